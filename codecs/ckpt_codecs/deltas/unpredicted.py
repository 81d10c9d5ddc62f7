"""Parts that nothing foretells: chunks of the lossless codecs."""

from collections.abc import Callable

import numpy as np

from ckpt_codecs.base import Array, Bytes, Codec, DType, Shape
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.deltas.format_ids import NOTHING
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import ROWS_AND_CONTEXT
from ckpt_codecs.lossless.candidates import candidate_codecs
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossless.integers import Integers
from ckpt_codecs.lossless.moments import FirstMoment, SecondMoment
from ckpt_codecs.lossless.zstd import Zstd
from ckpt_codecs.native import lossless

PLAIN: tuple[type[Codec], ...] = (Planes, FirstMoment, SecondMoment, Integers, Zstd)
"""By the number that stands in files."""
SAMPLES, SAMPLE = 16, 256
SHARE, LEAST_ROWS = 8, 16
"""Rows of which one is tried, and how many these must be."""


def encode_unpredicted(state: str, values: Array, level: str, context: Callable[[str], Array | None]) -> bytes:
    """A part of the first codec for such a state. `context` gives other states, or None where they must not tell."""
    codec = candidate_codecs("parameter", state, values.dtype, level)[0]
    base = None if codec.context is None else context(codec.context)
    return bytes([NOTHING, PLAIN.index(type(codec))]) + codec.encode(values, base)


def decode_unpredicted(number: int, data: Bytes, shape: Shape, dtype: DType, context: Callable[[str], Array]) -> Array:
    if number >= len(PLAIN):
        raise CodecError(f"there is no codec of number {number}")
    codec = PLAIN[number]()
    base = context(codec.context) if codec.context is not None and data[:1] == bytes([ROWS_AND_CONTEXT]) else None
    return codec.decode(data, shape, dtype, base)


def estimate_unpredicted(values: Array) -> float:
    """Bytes that planes would take, told from a sample."""
    bits = sampled(as_uints(values))
    if not bits.size:
        return 0.0
    planes = lossless.split_planes(bits, values.dtype.kind in "fcV")
    return sum(map(lossless.estimate_bits, planes)) / 8 * values.size


def estimate_by_rows(state: str, values: Array, level: str, context: Callable[[str], Array | None]) -> float:
    """Bytes that the plain codec would take, told from some rows in the middle; 0 if there are too few."""
    many = values.shape[0] // SHARE if values.ndim == 2 else 0
    if many < LEAST_ROWS:
        return 0.0
    some = slice(values.shape[0] // 2, values.shape[0] // 2 + many)

    def held(name: str) -> Array | None:
        other = context(name)
        return other[some] if other is not None and other.shape == values.shape else None

    return len(encode_unpredicted(state, values[some], level, held)) * float(values.shape[0] / many)


def sampled(bits: Array) -> Array:
    """Neighbours from sixteen places."""
    each = bits.size // SAMPLES
    many = min(each, SAMPLE)
    return np.ascontiguousarray(bits[: SAMPLES * each].reshape(SAMPLES, each)[:, :many]).reshape(-1) if many else bits
