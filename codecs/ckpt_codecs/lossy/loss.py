"""What a lossy delta has lost, measured: sums that chunks and parameters add up to."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.delta import Change, States


@dataclass(frozen=True)
class Loss:
    """Of one state. Sums of squares; the change is from the state before, 0 in an anchor, to the true one."""

    max_abs: float = 0.0
    error: float = 0.0
    change: float = 0.0
    along: float = 0.0
    """The change that was made, times the true one, summed."""

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(
            max(self.max_abs, other.max_abs),
            self.error + other.error,
            self.change + other.change,
            self.along + other.along,
        )

    @property
    def relative(self) -> float:
        """The error's Euclidean norm, in that of the change."""
        return sqrt(self.error / self.change) if self.change else float(self.error > 0)

    @property
    def progress(self) -> float:
        """How much of the change was retained: 1 is all of it, 0 none."""
        return self.along / self.change if self.change else 1.0

    def figures(self) -> dict[str, float]:
        """What a manifest says of it."""
        return {"max_abs": self.max_abs, "rel": self.relative, "progress": self.progress}


def measure(change: Change, decoded: States) -> dict[str, Loss]:
    """The loss of each state of a chunk. What is equal bit for bit loses nothing, NaNs included."""
    return {name: _loss(true, decoded[name], change.before.get(name)) for name, true in change.after.items()}


def _loss(true: Array, made: Array, before: Array | None) -> Loss:
    if true.tobytes() == made.tobytes() and not _is_number(true):
        return Loss()
    wide = true.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(made.astype(np.float64) - wide)
        old = 0.0 if before is None else before.astype(np.float64)
        moved = _finite(wide - old)
        along = float((moved * _finite(made.astype(np.float64) - old)).sum())
        return Loss(float(off.max(initial=0)), float(np.square(off).sum()), float(np.square(moved).sum()), along)


def _finite(values: Array) -> Array:
    """Without what is no number, as it is in the state before."""
    return np.where(np.isfinite(values), values, 0.0)


def _is_number(array: Array) -> bool:
    return array.dtype.kind in "biu" or bool(np.isfinite(array).all())
