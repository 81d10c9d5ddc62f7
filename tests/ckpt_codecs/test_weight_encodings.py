"""The encodings of `benchmarks/weight_encodings.py`: every bit comes back, whatever changed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Iterator[None]:
    """The modules of the benchmarks, only for this module."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def changes(shape: tuple[int, ...]) -> Iterator[tuple[Array, Array]]:
    """Yield the bits of weights before and after: nothing changed, some, the last one, and all."""
    random = np.random.default_rng([3, *shape])
    before = random.integers(0, 1 << 16, int(np.prod(shape)), np.uint16)
    fresh = random.integers(0, 1 << 16, before.size, np.uint16)
    yield before, before.copy()
    yield before, np.where(random.random(before.size) < 0.01, fresh, before)
    yield before, np.concatenate([before[:-1], ~before[-1:]])
    yield before, fresh


@pytest.mark.parametrize("shape", [(200, 90), (700,), (3, 5, 7), (1,)], ids=str)
def test_encodings_of_weights_give_every_bit_back(shape: tuple[int, ...]) -> None:
    from weight_encodings import OTHERS, ckpt_encodings  # type: ignore[import-not-found]

    for before, after in changes(shape):
        for encoding in (*ckpt_encodings(), *OTHERS):
            target = before.copy()
            encoding.decode(encoding.encode(before, after, shape), target, shape)
            assert np.array_equal(target, after), encoding.name
