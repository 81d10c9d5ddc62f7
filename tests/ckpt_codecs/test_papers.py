"""The codecs of papers in `benchmarks/papers`: every bit back, or within the bound that they promise."""

import sys
from collections.abc import Iterator
from math import log1p
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from held import array, bits

Array = np.ndarray[Any, Any]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def papers() -> Iterator[None]:
    """The package of the benchmarks, only for this module."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def moved(shape: tuple[int, ...], change: float = 1e-4) -> tuple[Array, Array]:
    """Weights at two steps."""
    random = np.random.default_rng([7, *shape])
    before = random.normal(0, 0.02, shape).astype(np.float32)
    return before, before + random.normal(0, change, shape).astype(np.float32)


SHAPES = [(70, 90), (3000,), (5,), (0,)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fm_delta_gives_every_bit_back(shape: tuple[int, ...], dtype: str) -> None:
    from papers import fm_delta  # type: ignore[import-not-found]

    for before, after in (moved(shape), (array(np.dtype("f4"), shape, 1), array(np.dtype("f4"), shape, 2))):
        wanted = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
        with np.errstate(all="ignore"):
            old, new = before.astype(wanted), after.astype(wanted)
        assert bits(fm_delta.decode(fm_delta.encode(new, old), old)) == bits(new)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [1e-1, 1e-3, 1e-5])
def test_delta_dnn_keeps_its_bound(shape: tuple[int, ...], eps: float) -> None:
    from papers import delta_dnn

    before, after = moved(shape)
    decoded = delta_dnn.decode(delta_dnn.encode(after, before, eps), before)
    assert decoded.shape == after.shape
    assert np.abs(decoded.astype(np.float64) - after).max(initial=0) <= log1p(eps) + 1e-8


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [4, 8, 12])
def test_qd_keeps_its_bound(shape: tuple[int, ...], width: int) -> None:
    from papers import qd

    before, after = moved(shape)
    decoded = qd.decode(qd.encode(after, before, width), before)
    assert decoded.shape == after.shape
    assert np.abs(decoded.astype(np.float64) - after).max(initial=0) <= qd.step_size(after, width) / 2 + 1e-8


def test_inshrinkerator_decodes_the_classes_that_it_encoded() -> None:
    from papers import inshrinkerator

    before, after = moved((200, 90))
    old = inshrinkerator.quantise(before, 4, 0.2)
    new = inshrinkerator.quantise(after, 4, 0.2, old)
    data = inshrinkerator.encode(new, old)
    decoded = inshrinkerator.decode(data, old)
    assert bits(decoded.values()) == bits(new.values())
    assert len(data) < after.size / 2  # most classes are as they were
    values, size = new.values().reshape(after.shape), np.abs(after)
    pruned, protected = size < np.quantile(size, 0.2), size > np.quantile(size, 0.995)
    assert not values[pruned].any()
    assert np.abs(values[protected] / after[protected] - 1).max() <= 2**-8
    assert np.unique(values[~pruned & ~protected]).size <= 16


@pytest.mark.parametrize("width", [None, 2, 4, 8])
def test_check_n_run_stores_the_rows_that_changed(width: int | None) -> None:
    from papers import check_n_run

    before, _ = moved((500, 16))
    after, rows = before.copy(), np.arange(3, 500, 9)
    after[rows] += np.float32(0.01) * np.arange(16, dtype=np.float32)
    data = check_n_run.encode(after, before, width)
    decoded = check_n_run.decode(data, before)
    rest = np.setdiff1d(np.arange(500), rows)
    assert bits(decoded[rest]) == bits(before[rest])
    if width is None:
        assert bits(decoded) == bits(after)
    else:
        wide = after[rows].max(axis=1) - after[rows].min(axis=1)
        error = np.linalg.norm(decoded[rows] - after[rows], axis=1)
        plain = wide / (2**width - 1) / 2 * np.sqrt(16)  # the search is never worse than the full range
        assert (error <= plain * 1.001).all()
    assert len(data) < rows.size * 16 * 4 + 200


@pytest.mark.parametrize("count", [0, 1, 3000, 70_001])
@pytest.mark.parametrize("kinds", [1, 2, 256])
def test_the_coders_give_every_symbol_back(count: int, kinds: int) -> None:
    from papers import coding

    random = np.random.default_rng([count, kinds])
    symbols = np.minimum(random.geometric(0.3, count) - 1, kinds - 1).astype(np.uint8)
    symbols[:: max(1, count // 3)] = kinds - 1
    assert np.array_equal(coding.decode_symbols(coding.encode_symbols(symbols)), symbols)
    sparse = np.where(random.random(count) < 0.002, symbols, 0).astype(np.uint8)
    for one in (symbols, sparse):
        assert np.array_equal(coding.decode_runs(coding.encode_runs(one)), one)
    wide = random.integers(-(1 << 40), 1 << 40, count)
    assert np.array_equal(coding.decode_integers(coding.encode_integers(wide)), wide)
