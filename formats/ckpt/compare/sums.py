"""Figures of two tensors: sums over their blocks, in one pass over both."""

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.transfer import as_bytes

_BLOCK = 1 << 13
"""Elements that are compared at once. Their float64 values stay in a core's cache, and OpenBLAS starts no threads for
vectors of this length."""
_BIAS, _EXPONENTS = 1023, 2048
"""Of float64."""


@dataclass(frozen=True)
class Histogram:
    """How many differences lie in [2^k, 2^(k+1)), for each k from `lowest` on. Those of 0 are in none."""

    lowest: int = 0
    counts: tuple[int, ...] = ()

    __repr__ = short_repr

    def __add__(self, other: "Histogram") -> "Histogram":
        if not (self.counts and other.counts):
            return self if self.counts else other
        lowest = min(self.lowest, other.lowest)
        stop = max(self.lowest + len(self.counts), other.lowest + len(other.counts))
        counts = [0] * (stop - lowest)
        for part in (self, other):
            for k, count in enumerate(part.counts, part.lowest - lowest):
                counts[k] += count
        return Histogram(lowest, tuple(counts))


@dataclass(frozen=True)
class DiffSums:
    """Sums over the blocks of a pair. Elements that are not finite in both tensors are only counted; so are codes."""

    elements: int = 0
    changed: int = 0
    largest: float = 0.0
    squares: float = 0.0
    """Of the differences."""
    first: float = 0.0
    """Squares of the first tensor's elements; `second` likewise, `product` of both."""
    second: float = 0.0
    product: float = 0.0
    not_finite: int = 0
    histogram: Histogram = Histogram()
    """Of the differences, without their signs."""
    codes: int = 0
    """Elements of quantised weights: codes and scales, whose numbers alone mean nothing."""
    first_not_finite: int = 0
    """Of the first tensor's elements alone; `second_not_finite` likewise."""
    second_not_finite: int = 0

    __repr__ = short_repr

    def __add__(self, other: "DiffSums") -> "DiffSums":
        return DiffSums(
            self.elements + other.elements,
            self.changed + other.changed,
            max(self.largest, other.largest),
            self.squares + other.squares,
            self.first + other.first,
            self.second + other.second,
            self.product + other.product,
            self.not_finite + other.not_finite,
            self.histogram + other.histogram,
            self.codes + other.codes,
            self.first_not_finite + other.first_not_finite,
            self.second_not_finite + other.second_not_finite,
        )

    @property
    def is_measured(self) -> bool:
        """Whether the figures stand for all elements that have values: none of those is NaN or infinite.

        Else there is no largest difference and no cosine: those of the finite elements would look like a small change.
        """
        return not self.not_finite and not 0 < self.elements == self.codes

    @property
    def rms(self) -> float:
        """The root mean square of the differences."""
        return sqrt(self.squares / (self.elements - self.codes)) if self.elements > self.codes else 0.0

    @property
    def relative(self) -> float | None:
        """The norm of the difference by the norm of the first tensor; None if the latter is 0."""
        return sqrt(self.squares / self.first) if self.first else None

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between the two tensors; None if one is 0."""
        norm = sqrt(self.first) * sqrt(self.second)
        if norm and not self.changed:
            return 1.0
        return max(-1.0, min(1.0, self.product / norm)) if norm else None


def changed_codes(a: Array, b: Array) -> DiffSums:
    """Compare the bits of two blocks of one shape and dtype, whose numbers alone mean nothing."""
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    return DiffSums(a.size, _unequal_bits(a, b), codes=a.size)


def diff_sums(a: Array, b: Array) -> DiffSums:
    """Compare two blocks of one shape: bit for bit if they have the same dtype, else by value.

    a, b: arrays of one shape, of any types of numbers or booleans.
    """
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    total, counts = DiffSums(), np.zeros(_EXPONENTS, np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, a.size, _BLOCK):
            total += _sums_of(a[at : at + _BLOCK], b[at : at + _BLOCK], counts)
    exponents = np.flatnonzero(counts)
    if not exponents.size:
        return total
    lowest, highest = int(exponents[0]), int(exponents[-1])
    return replace(total, histogram=Histogram(lowest - _BIAS, tuple(counts[lowest : highest + 1].tolist())))


def _sums_of(a: Array, b: Array, counts: Array) -> DiffSums:
    """All sums except the histogram. `counts`, (2048,) int64, is increased: the differences by their exponents."""
    x, y = _numbers(a), _numbers(b)
    changed = _unequal_bits(a, b) if a.dtype == b.dtype else _unequal_values(x, y)
    are_finite = np.isfinite(x), np.isfinite(y)
    finite = are_finite[0] & are_finite[1]
    strange = x.size - int(np.count_nonzero(finite))
    by_side = (0, 0)
    if strange:
        by_side = (x.size - int(np.count_nonzero(are_finite[0])), x.size - int(np.count_nonzero(are_finite[1])))
        x, y = x[finite], y[finite]
    first = float(np.vdot(x, x).real)
    if not changed:
        return DiffSums(a.size, 0, 0.0, 0.0, first, first, first, strange, Histogram(), 0, *by_side)
    off = np.abs(y - x)
    sums = float(np.vdot(off, off)), first, float(np.vdot(y, y).real), float(np.vdot(x, y).real)
    # A float64 that is not negative begins with its exponent.
    counts += np.bincount(off.view(np.int64) >> 52, minlength=_EXPONENTS)
    counts[0] -= off.size - np.count_nonzero(off)
    return DiffSums(a.size, changed, float(off.max(initial=0.0)), *sums, strange, Histogram(), 0, *by_side)


def _unequal_bits(a: Array, b: Array) -> int:
    itemsize = a.dtype.itemsize
    word = min(itemsize, 8)
    unequal = as_bytes(a).view(f"u{word}") != as_bytes(b).view(f"u{word}")
    return int(np.count_nonzero(unequal if word == itemsize else unequal.reshape(a.size, -1).any(axis=1)))


def _unequal_values(x: Array, y: Array) -> int:
    return x.size - int(np.count_nonzero((x == y) | (np.isnan(x) & np.isnan(y))))


def _numbers(values: Array) -> Array:
    """The values as float64 or complex128; the shape is unchanged."""
    if values.dtype.kind == "c":
        return values.astype(np.complex128)
    assert is_float(values.dtype) or values.dtype.kind in "iub", values.dtype
    return values.astype(np.float64)
