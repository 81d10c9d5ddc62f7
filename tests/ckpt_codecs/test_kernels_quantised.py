"""The kernels of quantised weights against their twins in NumPy, at every level that this CPU runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle.quantised
from ckpt_codecs import CodecError
from ckpt_codecs.base import Array
from ckpt_codecs.native import quantised
from kernel_trials import Engine, Trial, Trials

TRIALS = Trials(quantised, oracle.quantised)
PROTOTYPES, KERNELS = TRIALS.prototypes, TRIALS.kernels
U8, F32 = np.uint8, np.float32


def floats(random: np.random.Generator, *shape: int) -> Array:
    """Numbers of all sizes, zeros and infinities; no NaN, whose bits a processor chooses."""
    values = random.normal(0, 1, shape).astype(F32) * F32(10.0) ** random.integers(-30, 30, shape).astype(F32)
    values[random.random(shape) < 0.05] = random.choice([0.0, -0.0, 3e38])
    return values


def finite(out: Array) -> Array:
    """The values, with one NaN."""
    return np.where(np.isnan(out), F32(0), out).astype(F32)


@TRIALS.of("scale_codes")
def make_codes(random: np.random.Generator, n: int) -> Trial:
    rows = int(random.integers(1, 9))
    columns = n // rows
    block = int(random.integers(1, 7)), int(random.choice([1, 3, 32, 128]))
    skipped = int(random.integers(0, block[0])), int(random.integers(0, block[1]))
    shape = [
        -(-(skip + count) // size) if count else 0
        for skip, count, size in zip(skipped, (rows, columns), block, strict=True)
    ]
    codes, table = random.integers(0, 256, (rows, columns), U8), floats(random, 256)
    scales = floats(random, *shape)

    def run(engine: Engine) -> Any:
        out = np.zeros((rows, columns), F32)
        engine.scale_codes(codes, table, scales, skipped, block, out)
        return finite(out)

    return run


@TRIALS.of("scale_nibbles")
def make_nibbles(random: np.random.Generator, n: int) -> Trial:
    block, high_first = int(random.choice([2, 16, 32, 64, 128])), bool(random.integers(0, 2))
    packed, table, scales = random.integers(0, 256, n, U8), floats(random, 16), floats(random, -(-2 * n // block))

    def run(engine: Engine) -> Any:
        out = np.zeros(2 * n, F32)
        engine.scale_nibbles(packed, high_first, table, scales, block, out)
        return finite(out)

    return run


@TRIALS.of("scale_integers")
def make_integers(random: np.random.Generator, n: int) -> Trial:
    count, offset, block = n // 34, int(random.integers(0, 3)), int(random.integers(1, 33))
    blocks, scales = random.integers(0, 256, (count, 36), U8), floats(random, count)

    def run(engine: Engine) -> Any:
        out = np.zeros((count, block), F32)
        engine.scale_integers(blocks, offset, scales, out)
        return finite(out)

    return run


@TRIALS.of("unpack_words")
def make_words(random: np.random.Generator, n: int) -> Trial:
    bits, down, rows = int(random.integers(1, 9)), bool(random.integers(0, 2)), int(random.integers(1, 5))
    shifts = random.integers(0, 33 - bits, int(random.choice([1, 4, 8, 16])), U8)
    words = random.integers(0, 1 << 32, (rows, n // rows), np.uint32)

    def run(engine: Engine) -> Any:
        out = np.zeros(words.size * shifts.size, U8)
        engine.unpack_words(words, bits, shifts, down, out)
        return out

    return run


@TRIALS.of("scale_columns")
def make_columns(random: np.random.Generator, n: int) -> Trial:
    rows, count = int(random.choice([1, 7, 80])), int(random.integers(1, 5))
    codes = random.integers(0, 256, (rows, n // rows), U8)
    zeros, scales = floats(random, count, n // rows), floats(random, count, n // rows)
    groups = random.integers(0, count, rows).astype(np.int32)
    if random.random() < 0.1:
        groups[-1] = random.choice([-1, count, 1 << 30])

    def run(engine: Engine) -> Any:
        out = np.zeros(codes.shape[::-1], F32)
        return finite(out) if engine.scale_columns(codes, groups, zeros, scales, out) else None

    return run


@TRIALS.of("encode_mxfp4")
def make_mxfp4(random: np.random.Generator, n: int) -> Trial:
    values = floats(random, n // 32, 32)
    ties = random.random(len(values)) < 0.3
    values[ties] = random.integers(-32, 33, (int(ties.sum()), 32)) * F32(0.25)
    values[random.random(len(values)) < 0.1] = 0

    def run(engine: Engine) -> Any:
        codes, scales = np.zeros((len(values), 16), U8), np.zeros(len(values), U8)
        engine.encode_mxfp4(values, codes, scales)
        return codes, scales

    return run


def test_no_kernel_of_the_header_is_forgotten() -> None:
    assert sorted(TRIALS) == sorted(KERNELS)
    assert list(quantised.SIGNATURES) == list(PROTOTYPES)


@pytest.mark.parametrize("name", KERNELS)
@given(st.integers(0, 1 << 32), st.integers(0, 1100))
def test_kernel_of_quantised_weights_does_what_its_twin_does(name: str, seed: int, n: int) -> None:
    TRIALS.agree(name, seed, n)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_quantised_weights_refuse_sizes_that_do_not_fit(name: str) -> None:
    TRIALS.refuse_bad_sizes(name)


def test_arrays_that_do_not_fit_are_refused() -> None:
    codes, sixteen, many = np.zeros((2, 4), U8), np.zeros(16, F32), np.zeros(256, F32)
    groups = np.zeros(2, np.int32)
    for call in (
        lambda: quantised.scale_codes(codes, sixteen, many[:1], (0, 0), (2, 4), many[:8]),
        lambda: quantised.scale_codes(codes, many, many[:1], (0, 0), (2, 4), many[:7]),
        lambda: quantised.scale_nibbles(codes.reshape(-1), False, many, many[:1], 16, many[:16]),
        lambda: quantised.scale_integers(codes, 0, many[:2], many[:4].reshape(1, 4)),
        lambda: quantised.encode_mxfp4(many.reshape(8, 32), codes, codes[0]),
        lambda: quantised.unpack_words(codes.view(np.uint32), 4, codes[0], True, codes[0]),
        lambda: quantised.scale_columns(codes, groups, many[:4], many[:4], many[:8]),
        lambda: quantised.scale_columns(codes, groups, many[:8], many[:8].reshape(2, 4), many[:8]),
    ):
        with pytest.raises(CodecError, match="this is a bug"):
            call()
