"""Figures of the values of a tensor, in one pass over them.

Each value is taken as float64; sums are float64. A tensor is divided into pieces of at most `PIECE` elements, the same
for each number of threads and each budget of memory, and the figures of pieces are added in order. So all figures are
the same each time, to the bit.

Values of one or two bytes are counted by their bits, and each sum is one over the distinct values; those of float32 and
float64 are added in 16 parts. docs/stats.md states both.
"""

from dataclasses import dataclass, field
from functools import cache
from math import sqrt

import numpy as np

from ckpt.compare.sums import Histogram
from ckpt_codecs.native.stats import EXPONENT_COUNT, SUM_PARTS, count_values, measure_floats
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.tensor import Array

PIECE = 1 << 23
"""Elements of a tensor whose figures are computed by one thread."""
_FEW = 1 << 13
"""Elements below which short values are widened: a table of all their bits would take longer than they do."""
_BIAS = 1023


@dataclass(frozen=True)
class Figures:
    """Figures of the values of one or several tensors. Of a complex number, both parts are values."""

    values: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    least: float | None = None
    """The least finite value; None if there is none. So for `greatest`."""
    greatest: float | None = None
    total: float = 0.0
    """The sum of the finite values."""
    squares: float = 0.0
    """The sum of their squares."""
    histogram: Histogram = field(default_factory=Histogram)
    """How many finite values that are not zero have a magnitude in [2^k, 2^(k+1))."""

    __repr__ = short_repr

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(
            self.values + other.values,
            self.nans + other.nans,
            self.infinities + other.infinities,
            self.zeros + other.zeros,
            min((one.least for one in (self, other) if one.least is not None), default=None),
            max((one.greatest for one in (self, other) if one.greatest is not None), default=None),
            self.total + other.total,
            self.squares + other.squares,
            self.histogram + other.histogram,
        )

    @property
    def finite(self) -> int:
        """How many values are neither NaN nor infinite."""
        return self.values - self.nans - self.infinities

    @property
    def mean(self) -> float | None:
        """The mean of the finite values; None if there is none."""
        return self.total / self.finite if self.finite else None

    @property
    def norm(self) -> float:
        """The root of the sum of squares of the finite values; infinite if that sum exceeds float64."""
        return sqrt(self.squares)


class Measurement:
    """The figures of a piece of a tensor whose values come in blocks, one after another."""

    def __init__(self, dtype: DType, size: int) -> None:
        """`size`: how many elements the piece has."""
        self._dtype = dtype
        is_short = dtype.itemsize <= 2 and size >= _FEW
        self._words = np.zeros(1 << 8 * dtype.itemsize, np.uint32) if is_short else None
        self._sums, self._extremes = np.zeros((2, SUM_PARTS)), np.array([np.inf, -np.inf])
        self._counts, self._exponents = np.zeros(3, np.int64), np.zeros(EXPONENT_COUNT, np.int64)
        self._size = 0

    def add(self, block: Array) -> None:
        """Add a block of values, of any shape and the dtype of the piece."""
        flat = np.ascontiguousarray(block).reshape(-1)
        if self._words is not None:
            count_values(flat.view(f"u{flat.itemsize}"), self._words)
            return
        if flat.dtype.kind == "c":
            flat = flat.view(f"f{flat.itemsize // 2}")
        elif flat.itemsize <= 2:
            flat = flat.astype(np.float32)
        elif flat.dtype.kind != "f":
            flat = flat.astype(np.float64)
        measure_floats(flat, self._size, self._sums, self._extremes, self._counts, self._exponents)
        self._size += flat.size

    def figures(self) -> Figures:
        """The figures of all blocks so far."""
        if self._words is not None:
            return _of_words(self._words, _values_of(self._dtype))
        nans, infinities, zeros = self._counts.tolist()
        least, greatest = self._extremes.tolist()
        has_any = least <= greatest
        with np.errstate(over="ignore", invalid="ignore"):
            total, squares = self._sums.sum(axis=1).tolist()
        return Figures(
            *(self._size, nans, infinities, zeros, least if has_any else None, greatest if has_any else None),
            *(total, squares, _histogram(self._exponents)),
        )


@cache
def _values_of(dtype: DType) -> Array:
    """The value of each word of a type of one or two bytes: (256,) or (65536,) float64."""
    words = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        values = words.view(dtype).astype(np.float64) + 0.0
    values.setflags(write=False)
    return values


def _of_words(counts: Array, values: Array) -> Figures:
    """The figures of short words, of which the table has the `counts`, (n,) uint32, and the `values`, (n,) float64."""
    words = np.flatnonzero(counts)
    numbers, times = values[words], counts[words].astype(np.int64)
    nan, finite = np.isnan(numbers), np.isfinite(numbers)
    size, nans, zeros = int(times.sum()), int(times[nan].sum()), int(times[numbers == 0].sum())
    infinities = size - nans - int(times[finite].sum())
    numbers, times = numbers[finite], times[finite]
    products = numbers * times
    exponents = np.zeros(EXPONENT_COUNT, np.int64)
    is_any = numbers != 0
    np.add.at(exponents, np.frexp(np.abs(numbers[is_any]))[1] - 1 + _BIAS, times[is_any])
    least, greatest = (float(numbers.min()), float(numbers.max())) if numbers.size else (None, None)
    total, squares = float(products.sum()), float((products * numbers).sum())
    return Figures(size, nans, infinities, zeros, least, greatest, total, squares, _histogram(exponents))


def _histogram(exponents: Array) -> Histogram:
    """The histogram of biased exponents of float64: (2048,) int64."""
    used = np.flatnonzero(exponents)
    if not used.size:
        return Histogram()
    lowest, highest = int(used[0]), int(used[-1])
    return Histogram(lowest - _BIAS, tuple(exponents[lowest : highest + 1].tolist()))
