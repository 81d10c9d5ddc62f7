"""Errors of decoded states: statistics that add up over chunks and parameters."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.delta import StatePair, States


@dataclass(frozen=True)
class ErrorStats:
    """Sums over the elements of one state. The true change is from the state before (0 if there is none)."""

    elements: int = 0
    differing: int = 0
    """Elements with other bits."""
    max_abs: float = 0.0
    """The largest absolute error."""
    error: float = 0.0
    """The sum of the squared errors."""
    norm: float = 0.0
    """The sum of the squared true values."""
    change: float = 0.0
    """The sum of the squared true changes."""
    along: float = 0.0
    """The sum of the products of true and decoded changes."""

    def __add__(self, other: "ErrorStats") -> "ErrorStats":
        return ErrorStats(
            self.elements + other.elements,
            self.differing + other.differing,
            max(self.max_abs, other.max_abs),
            self.error + other.error,
            self.norm + other.norm,
            self.change + other.change,
            self.along + other.along,
        )

    @property
    def relative(self) -> float:
        """The Euclidean norm of the error over that of the change."""
        return sqrt(self.error / self.change) if self.change else float(self.error > 0)

    @property
    def of_values(self) -> float:
        """The Euclidean norm of the error over that of the true values."""
        return sqrt(self.error / self.norm) if self.norm else 0.0

    @property
    def progress(self) -> float:
        """The share of the change that was retained: 1 is all of it, 0 none."""
        return self.along / self.change if self.change else 1.0

    def figures(self) -> dict[str, float]:
        """The figures that a manifest and reports state."""
        return {"max_abs": self.max_abs, "rel": self.relative, "progress": self.progress}


def measure(change: StatePair, decoded: States) -> dict[str, ErrorStats]:
    """The errors of each decoded state of a chunk, by name."""
    return {name: measured(true, decoded[name], change.before.get(name)) for name, true in change.after.items()}


def measured(true: Array, decoded: Array, before: Array | None = None) -> ErrorStats:
    """The errors of one decoded state. `true`, `decoded` and `before`: one shape and dtype.

    Elements with equal bits have no error, even NaNs. NaNs with other bits count only in `differing`.
    """
    differing = _count_differing(true, decoded)
    with np.errstate(all="ignore"):
        actual, result = true.astype(np.float64), decoded.astype(np.float64)
        error = np.abs(result - actual) if differing else np.zeros((), np.float64)
        old = np.float64(0) if before is None else before.astype(np.float64)
        change = _with_zeros(actual - old)
        return ErrorStats(
            true.size,
            differing,
            float(np.fmax.reduce(error, axis=None, initial=0.0)),
            float(np.nansum(np.square(error))),
            float(np.nansum(np.square(actual))),
            float(np.square(change).sum()),
            float((change * _with_zeros(result - old)).sum()),
        )


def _count_differing(true: Array, decoded: Array) -> int:
    width = true.dtype.itemsize
    bits = (np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, width) for values in (true, decoded))
    return int(np.not_equal(*bits).any(axis=1).sum())


def _with_zeros(values: Array) -> Array:
    """The values, with zeros for those that are not finite."""
    return np.where(np.isfinite(values), values, 0.0)
