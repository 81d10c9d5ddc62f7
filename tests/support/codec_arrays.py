"""Chunks as training makes them, and as nobody would: for every codec, with a base where it takes one."""

from collections.abc import Iterator

import numpy as np

from ckpt_codecs import Codec, FirstMoment, Integers, Planes, SecondMoment, Zstd
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array
from held import FLOATS, STORABLE, array

CHUNKED: list[Codec] = [Planes(), FirstMoment(), SecondMoment(), Integers(), Zstd()]
"""Every codec of chunks."""

SHAPES = [(), (0,), (1,), (15,), (17,), (3, 0, 2), (7, 1, 3), (4, 64), (3, 3, 70)]
LARGER = [(525,), (65, 80)]
F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]

Case = tuple[str, Array, Array | None]


def cases(seed: int = 0) -> Iterator[Case]:
    """Name, values and base."""
    random = np.random.default_rng(seed)
    for dtype in STORABLE:
        for shape in [*SHAPES, *LARGER]:
            yield f"bits-{dtype}-{shape}", array(dtype, shape, seed), array(F32, shape, seed + 1)
    with np.errstate(all="ignore"):
        for dtype in FLOATS:
            for shape in LARGER:
                weights = random.normal(0, 0.02, shape)
                yield f"weights-{dtype}-{shape}", weights.astype(dtype), None
                sparse = weights * (random.random(shape) < 0.05)
                yield f"mostly-zero-{dtype}-{shape}", sparse.astype(dtype), None
    yield from moments(random)
    for dtype in ("int8", "int32", "int64", "uint16"):
        for name, values in integers(random):
            yield f"{name}-{dtype}", values.astype(dtype), None
    yield "mask", np.tril(np.ones((200, 200), np.bool_)), None
    yield "rare", random.random(30000) < 0.004, None


def moments(random: np.random.Generator) -> Iterator[Case]:
    """Moments of rows and columns of different scales, whole, with rows of zeros, negative and as garbage."""
    for shape in ((40, 64), (100, 100), (2, 3, 5, 70), (5000,)):
        scales = np.exp(random.normal(0, 2, shape[-1])) * np.exp(random.normal(0, 1, (*shape[:-1], 1)))
        second = (scales * random.chisquare(3, shape) * 1e-8).astype(F32)
        first = (np.sqrt(second) * random.normal(0, 1, shape)).astype(F32)
        yield f"moments-{shape}", first, second
        yield f"second-{shape}", second, None
        empty = np.where(random.random((*shape[:-1], 1)) < 0.3, np.float32(0), second)
        yield f"rows-of-zeros-{shape}", np.where(empty == 0, np.float32(0), first), empty
        yield f"second-with-zeros-{shape}", empty, None
        yield f"negative-second-{shape}", first, -second
        yield f"garbage-second-{shape}", first, array(F32, shape)
        yield f"bf16-{shape}", first.astype(BF16), second.astype(BF16)
        yield f"bf16-of-f32-{shape}", second.astype(BF16), first


def integers(random: np.random.Generator) -> Iterator[tuple[str, Array]]:
    yield "range", np.arange(9000)
    yield "negative-steps", np.arange(9000)[::-1] * 3
    yield "tokens", random.integers(0, 50000, (60, 70))
    yield "few", random.integers(0, 5, 9000)
    yield "walk", np.cumsum(random.integers(-3, 4, 9000))
