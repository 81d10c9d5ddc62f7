"""What has been lost, measured: sums that chunks and parameters add up to."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.delta import StatePair, States


@dataclass(frozen=True)
class ErrorStats:
    """Of one state. Sums of squares; the change is from the state before, 0 in an anchor, to the true one."""

    elements: int = 0
    differing: int = 0
    """Elements with other bits."""
    max_abs: float = 0.0
    error: float = 0.0
    norm: float = 0.0
    """Of the true values."""
    change: float = 0.0
    along: float = 0.0
    """The change that was made, times the true one, summed."""

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
        """The error's Euclidean norm, in that of the change."""
        return sqrt(self.error / self.change) if self.change else float(self.error > 0)

    @property
    def of_values(self) -> float:
        """The error's Euclidean norm, in that of the true values."""
        return sqrt(self.error / self.norm) if self.norm else 0.0

    @property
    def progress(self) -> float:
        """How much of the change was retained: 1 is all of it, 0 none."""
        return self.along / self.change if self.change else 1.0

    def figures(self) -> dict[str, float]:
        """In short."""
        return {"max_abs": self.max_abs, "rel": self.relative, "progress": self.progress}


def measure(change: StatePair, decoded: States) -> dict[str, ErrorStats]:
    """The loss of each state of a chunk."""
    return {name: measured(true, decoded[name], change.before.get(name)) for name, true in change.after.items()}


def measured(true: Array, kept: Array, before: Array | None = None) -> ErrorStats:
    """What was saved, what is kept of it, and what was kept of the step before.

    What is equal bit for bit loses nothing, NaNs included; what is no number counts in nothing else.
    """
    differing = _differing(true, kept)
    with np.errstate(all="ignore"):
        wide, made = true.astype(np.float64), kept.astype(np.float64)
        off = np.abs(made - wide) if differing else np.zeros((), np.float64)
        old = np.float64(0) if before is None else before.astype(np.float64)
        moved = _finite(wide - old)
        return ErrorStats(
            true.size,
            differing,
            float(np.fmax.reduce(off, axis=None, initial=0.0)),
            float(np.nansum(np.square(off))),
            float(np.nansum(np.square(wide))),
            float(np.square(moved).sum()),
            float((moved * _finite(made - old)).sum()),
        )


def _differing(true: Array, kept: Array) -> int:
    width = true.dtype.itemsize
    bits = (np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, width) for values in (true, kept))
    return int(np.not_equal(*bits).any(axis=1).sum())


def _finite(values: Array) -> Array:
    """With zeros for what is no number."""
    return np.where(np.isfinite(values), values, 0.0)
