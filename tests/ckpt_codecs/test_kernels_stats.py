"""The kernels of figures of values against their twins in NumPy, at every level that this CPU runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle.stats
from ckpt_codecs import CodecError
from ckpt_codecs.base import Array
from ckpt_codecs.native import stats
from kernel_trials import Engine, Trial, Trials

TRIALS = Trials(stats, oracle.stats)
PROTOTYPES, KERNELS = TRIALS.prototypes, TRIALS.kernels


def values_of(random: np.random.Generator, n: int) -> Array:
    """Random bits, or numbers of one size, in float32 or float64; NaN, infinity, zeros and denormals in some."""
    dtype = np.dtype(random.choice(["float32", "float64"]))
    if random.random() < 0.3:
        return random.integers(0, 256, n * dtype.itemsize, np.uint8).view(dtype)
    values = random.normal(0, 1, n).astype(dtype)
    tiny = np.array([3, 1 << 20], f"u{dtype.itemsize}").view(dtype)
    for odd in (np.nan, np.inf, -np.inf, 0.0, -0.0, *tiny):
        if random.random() < 0.3:
            values[random.random(n) < 0.02] = odd
    return values


def figures() -> tuple[Array, Array, Array, Array]:
    return np.zeros((2, 16)), np.array([np.inf, -np.inf]), np.zeros(3, np.int64), np.zeros(2048, np.int64)


@TRIALS.of("count_values")
def make_words(random: np.random.Generator, n: int) -> Trial:
    words = random.integers(0, int(random.choice([1, 2, 256, 65536])), n).astype(random.choice([np.uint8, np.uint16]))

    def run(engine: Engine) -> Any:
        counts = np.zeros(1 << 8 * words.itemsize, np.uint32)
        engine.count_values(words, counts)
        engine.count_values(words[: n // 3], counts)
        return counts

    return run


@TRIALS.of("measure_floats")
def make_floats(random: np.random.Generator, n: int) -> Trial:
    values, index, cut = values_of(random, n), int(random.integers(0, 40)), int(random.integers(0, n + 1))

    def run(engine: Engine) -> Any:
        own = figures()
        engine.measure_floats(values[:cut], index, *own)
        engine.measure_floats(values[cut:], index + cut, *own)
        return own

    return run


def test_no_kernel_of_the_header_is_forgotten() -> None:
    assert sorted(TRIALS) == sorted(KERNELS)
    assert list(stats.SIGNATURES) == list(PROTOTYPES)


@pytest.mark.parametrize("name", KERNELS)
@given(st.integers(0, 1 << 32), st.integers(0, 1100))
def test_kernel_of_figures_does_what_its_twin_does(name: str, seed: int, n: int) -> None:
    TRIALS.agree(name, seed, n)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_figures_refuse_sizes_that_do_not_fit(name: str) -> None:
    TRIALS.refuse_bad_sizes(name)


@pytest.mark.parametrize("seed", range(4))
def test_figures_of_several_blocks_are_those_of_the_twin_wherever_the_tensor_is_divided(seed: int) -> None:
    values = values_of(np.random.default_rng(seed), 13_000)
    whole, parts, twin = figures(), figures(), figures()
    stats.measure_floats(values, 0, *whole)
    for start in range(0, values.size, 777):
        stats.measure_floats(values[start : start + 777], start, *parts)
    oracle.stats.measure_floats(values, 0, *twin)
    assert [a.tobytes() for a in whole] == [b.tobytes() for b in parts] == [c.tobytes() for c in twin]


def test_arrays_of_other_sizes_are_refused() -> None:
    with pytest.raises(CodecError, match="255 elements"):
        stats.count_values(np.zeros(3, np.uint8), np.zeros(255, np.uint32))
    with pytest.raises(CodecError, match="int32"):
        stats.measure_floats(np.zeros(3, np.int32), 0, *figures())


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1])
def test_many_bytes_are_counted_as_few_are(size: int) -> None:
    words = np.random.default_rng(size).integers(0, 256, size, np.uint8) // 3
    counts = np.full(256, 5, np.uint32)
    stats.count_values(words, counts)
    assert np.array_equal(counts, 5 + np.bincount(words, minlength=256))
