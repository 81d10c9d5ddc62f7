"""The kernels of gradients' codecs against their twins in NumPy, at every level that this CPU runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle.gradients
from ckpt_codecs import CodecError
from ckpt_codecs.base import Array
from ckpt_codecs.native import gradients
from kernel_trials import Engine, Trial, Trials

TRIALS = Trials(gradients, oracle.gradients)
PROTOTYPES, KERNELS = TRIALS.prototypes, TRIALS.kernels
U8, U16, U32, F32 = np.uint8, np.uint16, np.uint32, np.float32


def words(random: np.random.Generator, n: int) -> Array:
    """Gradients dense and sparse, multiples of a factor with and without a value that is none, or any bits."""
    values = (random.normal(0, 1, n) * 10 ** random.uniform(-8, 0, n)).astype(F32)
    kind = random.integers(0, 6)
    if kind == 0:
        return random.integers(0, 1 << 32, n, U32)
    if kind == 1:
        values[random.random(n) < random.choice([0.5, 0.9, 0.999])] = 0
    if kind in (2, 3):
        values = (values.view(U32) & U32(0xFFFF0000)).view(F32) * F32(random.choice([1, 0.5, random.random()]))
    if kind in (3, 4) and n:
        values[random.integers(0, n)] = random.choice([np.nan, np.inf, -0.0, 1e-40, 3.4e38, 0.1])
    return values.view(U32)


def factor_of(random: np.random.Generator, given_: Array) -> float:
    bits = gradients.find_factor(given_) or int(random.integers(0x3F800000, 0x40000000))
    return float(U32(bits).view(F32)) if random.random() < 0.9 else float(random.choice([0, 0.5, 2, np.nan, 1, -1]))


@TRIALS.of("count_words")
def make_count(random: np.random.Generator, n: int) -> Trial:
    given_ = words(random, n)
    return lambda engine: engine.count_words(given_)


@TRIALS.of("split_sparse")
def make_split(random: np.random.Generator, n: int) -> Trial:
    given_, shift = words(random, n), int(random.integers(0, 9))
    count = int(np.count_nonzero(given_))

    def run(engine: Engine) -> Any:
        gaps, lows = np.zeros(count + n // 255, U8), np.zeros(gradients.lows_bytes(count, shift), U8)
        values = np.zeros(count, U32)
        return engine.split_sparse(given_, shift, gaps, lows, values), gaps, lows, values

    return run


@TRIALS.of("merge_sparse")
def make_merge(random: np.random.Generator, n: int) -> Trial:
    given_, shift = words(random, n), int(random.integers(0, 9))
    count = int(np.count_nonzero(given_))
    gaps, lows = np.zeros(count + n // 255, U8), np.zeros(gradients.lows_bytes(count, shift), U8)
    values = np.zeros(count, U32)
    gaps = gaps[: gradients.split_sparse(given_, shift, gaps, lows, values)]
    if gaps.size and random.random() < 0.3:
        gaps[random.integers(0, gaps.size)] = random.integers(0, 256)

    def run(engine: Engine) -> Any:
        out = np.zeros(n, U32)
        comes_back = engine.merge_sparse(gaps, shift, lows, values, out)
        return comes_back, out if comes_back else None

    return run


@TRIALS.of("find_factor")
def make_find(random: np.random.Generator, n: int) -> Trial:
    given_ = words(random, n)
    return lambda engine: engine.find_factor(given_)


@TRIALS.of("divide_by_factor")
def make_divide(random: np.random.Generator, n: int) -> Trial:
    given_ = words(random, n)
    factor = factor_of(random, given_)

    def run(engine: Engine) -> Any:
        out = np.zeros(n, U16)
        comes_back = engine.divide_by_factor(given_, factor, out)
        return comes_back, out if comes_back else None

    return run


@TRIALS.of("multiply_by_factor")
def make_multiply(random: np.random.Generator, n: int) -> Trial:
    given_ = random.integers(0, 1 << 16, n, U16)
    factor = factor_of(random, words(random, n))

    def run(engine: Engine) -> Any:
        out = np.zeros(n, U32)
        engine.multiply_by_factor(given_, factor, out)
        return out

    return run


@TRIALS.of("quantise_blocks")
def make_quantise(random: np.random.Generator, n: int) -> Trial:
    given_ = words(random, n)

    def run(engine: Engine) -> Any:
        scales, codes = np.zeros(-(-n // 512), U32), np.zeros(n, U8)
        return engine.quantise_blocks(given_, scales, codes), scales, codes

    return run


@TRIALS.of("restore_blocks")
def make_restore(random: np.random.Generator, n: int) -> Trial:
    codes, scales = random.integers(0, 256, n, U8), np.zeros(-(-n // 512), U32)
    if random.random() < 0.8:
        gradients.quantise_blocks(words(random, n), scales, codes)
    else:
        scales[:] = random.integers(0, 1 << 32, scales.size, U32)

    def run(engine: Engine) -> Any:
        out = np.zeros(n, U32)
        comes_back = engine.restore_blocks(codes, scales, out)
        return comes_back, out if comes_back else None

    return run


def columned_codes(random: np.random.Generator, n: int) -> tuple[Array, int]:
    """Codes of a matrix whose columns differ, or not, and the number of its columns; or any bytes."""
    columns = int(random.integers(1, min(n, 700) + 1))
    if random.random() < 0.1:
        return random.integers(0, 256, n, U8), columns
    scales = np.exp(random.normal(0, random.choice([0, 1]), columns)) * random.choice([0.3, 3, 30])
    codes = random.normal(0, 1, n) * scales[np.arange(n) % columns]
    codes = np.abs(codes) if random.random() < 0.3 else codes
    return np.clip(np.rint(codes), -127, 127).astype(np.int8).view(U8), columns


def classes_nbytes(n: int, columns: int, skipped: int) -> int:
    """Bytes before the directory."""
    rows = (skipped + n + columns - 1) // columns
    return 16 + (columns + 1) // 2 + (rows + 1) // 2


@TRIALS.of("write_columns")
def make_write_columns(random: np.random.Generator, n: int) -> Trial:
    if not n:
        return lambda engine: None
    codes, columns = columned_codes(random, n)
    skipped = int(random.integers(0, columns))

    def run(engine: Engine) -> Any:
        out = np.zeros(classes_nbytes(n, columns, skipped) + 20 + n, U8)
        taken = engine.write_columns(codes, columns, skipped, out)
        return taken, out[:taken]

    return run


@TRIALS.of("read_columns")
def make_read_columns(random: np.random.Generator, n: int) -> Trial:
    if not n:
        return lambda engine: None
    codes, columns = columned_codes(random, n)
    skipped = int(random.integers(0, columns))
    head = classes_nbytes(n, columns, skipped)
    source = np.zeros(head + 23 + n, U8)
    if not gradients.write_columns(codes, columns, skipped, source):  # one class that is stored, and three empty ones
        source = np.concatenate([np.zeros(head + 20, U8), codes, np.zeros(3, U8)])
        source[head + 1 :][:4] = np.array([n], "<u4").view(U8)
    if random.random() < 0.3:
        source[random.integers(0, head + 160) % source.size] ^= U8(1 << random.integers(0, 8))
    if random.random() < 0.1:
        source = source[: random.integers(0, source.size)].copy()

    def run(engine: Engine) -> Any:
        out = np.zeros(n, U8)
        taken = engine.read_columns(source, columns, skipped, out)
        return taken, out if taken else None

    return run


def test_no_kernel_of_the_header_is_forgotten() -> None:
    assert sorted(TRIALS) == sorted(KERNELS)
    assert list(gradients.SIGNATURES) == list(PROTOTYPES)


@pytest.mark.parametrize("name", KERNELS)
@given(st.integers(0, 1 << 32), st.integers(0, 1100))
def test_gradient_kernel_does_what_its_twin_does(name: str, seed: int, n: int) -> None:
    TRIALS.agree(name, seed, n)


@pytest.mark.parametrize("name", KERNELS)
def test_gradient_kernel_does_what_its_twin_does_with_a_large_chunk(name: str) -> None:
    for seed in range(6):
        TRIALS.agree(name, seed, (1 << 16) + 3)


@pytest.mark.parametrize("name", KERNELS)
def test_gradient_kernels_refuse_sizes_that_do_not_fit(name: str) -> None:
    TRIALS.refuse_bad_sizes(name)


def test_a_factor_is_the_one_that_multiplied() -> None:
    """Of a thousand factors, up to powers of two."""
    random = np.random.default_rng(0)
    for _ in range(1000):
        numbers = (random.normal(0, 1e-3, 300).astype(F32).view(U32) & U32(0xFFFF0000)).view(F32)
        factor = F32(random.uniform(1, 2)) * F32(2.0 ** random.integers(-9, 9))
        result = gradients.find_factor((numbers * factor).view(U32))
        assert result == 0x3F800000 | int(factor.view(U32)) & 0x7FFFFF


def test_arrays_of_other_sizes_are_refused() -> None:
    eight, seven = np.zeros(8, U32), np.zeros(7, U16)
    for call in (
        lambda: gradients.divide_by_factor(eight, 1.5, seven),
        lambda: gradients.multiply_by_factor(seven, 1.5, eight),
        lambda: gradients.quantise_blocks(eight, eight, seven.view(U8)[:7]),
        lambda: gradients.restore_blocks(seven.view(U8)[:7], eight, eight),
    ):
        with pytest.raises(CodecError, match="do not become"):
            call()
