"""What has to be known of a whole tensor before any block of it can be computed, in bounded memory.

The tensor is read once more for it, or a few times. Sums are formed of the same blocks in the same order, whatever
is read later by which thread, so the result has the same bits on any machine.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ckpt.combine.average_blob import BLOCK, as_float64
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, slabs
from ckpt_formats.core.tensor import Array, Blob, read

T = TypeVar("T")

_HIGH, _LOW = 16, 15
"""The bits of a float32 without its sign, in two halves: one histogram for each."""


class Once(Generic[T]):
    """A value that is computed when it is first needed; the blocks of a tensor share it.

    Threads wait for the one that computes it. A copy in another process computes its own, which is equal.
    """

    __slots__ = ("_compute", "_lock", "_value")

    def __init__(self, compute: Callable[[Reader], T]) -> None:
        self._compute, self._lock = compute, Lock()
        self._value: T | None = None

    def __reduce__(self) -> tuple[type["Once[T]"], tuple[Callable[[Reader], T]]]:
        return Once, (self._compute,)

    def get(self, reader: Reader) -> T:
        """The value. `reader` reads what it is computed from, if that has not happened yet."""
        with self._lock:
            if self._value is None:
                self._value = self._compute(reader)
            return self._value


def blocks(blobs: Sequence[Blob], reader: Reader) -> Iterator[tuple[Box, list[Array]]]:
    """The values of blobs of one shape, block by block: each is a vector of float64."""
    for box in slabs(blobs[0].shape, BLOCK):
        with np.errstate(all="ignore"):
            yield box, [as_float64(read(blob.crop(box), reader), False) for blob in blobs]


def exact_sum(parts: Sequence[float]) -> float:
    """The sum of sums of blocks, rounded once; with NaN or opposite infinities, NaN."""
    try:
        return math.fsum(parts)
    except (ValueError, OverflowError):
        return float(np.sum(np.array(parts)))


def magnitudes(model: Array, base: Array) -> Array:
    """The bits of the absolute differences, in float32: numbers that have their order; NaN is above all others.

    model, base: (n,) float64. Returns (n,) uint32. The difference of two float32 has the bits that float32 arithmetic
    gives: its rounding by way of float64 is exact (Figueroa, "When is double rounding innocuous?", 1995).
    """
    with np.errstate(all="ignore"):
        return (model - base).astype(np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)


class Threshold(NamedTuple):
    """Which elements are the largest."""

    least: int
    """The bits of the least magnitude that is kept."""
    end: int
    """Of elements with just this magnitude, those before this position in C order are kept."""


def threshold_of_largest(model: Blob, base: Blob, count: int, reader: Reader) -> Threshold:
    """The threshold that keeps just the `count` elements which differ most; of equal ones, those that come first.

    Two histograms of the bits find the magnitude. If not all elements with just this magnitude are kept, a third pass
    finds where they end.
    """
    high = np.zeros(1 << _HIGH, np.int64)
    for _, (x, b) in blocks((model, base), reader):
        high += np.bincount(magnitudes(x, b) >> np.uint32(_LOW), minlength=high.size)
    top, above = _bin_of_rank(high, count)
    low = np.zeros(1 << _LOW, np.int64)
    for _, (x, b) in blocks((model, base), reader):
        bits = magnitudes(x, b)
        bits = bits[bits >> np.uint32(_LOW) == top]
        low += np.bincount(bits & np.uint32((1 << _LOW) - 1), minlength=low.size)
    bottom, above_there = _bin_of_rank(low, count - above)
    least, missing = top << _LOW | bottom, count - above - above_there
    if missing == low[bottom]:
        return Threshold(least, math.prod(base.shape))
    at = 0
    for _, (x, b) in blocks((model, base), reader):
        equal = np.flatnonzero(magnitudes(x, b) == least)
        if equal.size >= missing:
            return Threshold(least, at + int(equal[missing - 1]) + 1)
        missing -= equal.size
        at += x.size
    raise _changed()


def _bin_of_rank(counts: Array, rank: int) -> tuple[int, int]:
    """The bin with the `rank`-th largest element, and the number of elements in the bins above it."""
    totals = np.cumsum(counts[::-1])
    at = int(np.searchsorted(totals, rank))
    if at == counts.size:
        raise _changed()
    return counts.size - 1 - at, int(totals[at] - counts[::-1][at])


def _changed() -> CorruptError:
    return CorruptError("the values of a tensor changed between two passes over it", hint="Merge files at rest.")


def flat_indices(box: Box, shape: Sequence[int]) -> Array:
    """The positions in C order of the elements of a block of a tensor: (n,) uint64."""
    result: Array = np.zeros((1,) * len(shape), np.uint64)
    step = 1
    for axis in reversed(range(len(shape))):
        line = np.arange(box.start[axis], box.stop[axis], dtype=np.uint64) * np.uint64(step)
        result = result + line.reshape(-1, *(1,) * (len(shape) - 1 - axis))
        step *= shape[axis]
    return result.reshape(-1)
