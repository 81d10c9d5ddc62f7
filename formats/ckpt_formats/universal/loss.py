"""How far values that were kept are from those that were saved."""

from collections.abc import Callable, Mapping
from math import sqrt
from operator import add

import numpy as np

from ckpt_formats.base import Loss
from ckpt_formats.tensor import Array

_TOGETHER: Mapping[str, Callable[[float, float], float]] = {"differing": add, "elements": add, "progress": min}


class Measure:
    """Adds up, over the chunks of one state, what was lost."""

    def __init__(self) -> None:
        self._differing = self._elements = 0
        self._largest = self._error = self._change = self._norm = self._along = 0.0

    def note(self, true: Array, kept: Array, before: Array | None = None) -> None:
        """A chunk: what was saved, what is kept of it, and what was kept of the step before."""
        self._elements += true.size
        width = true.dtype.itemsize
        unequal = true.reshape(-1).view(np.uint8) != kept.reshape(-1).view(np.uint8)
        self._differing += int(unequal.reshape(-1, width).any(axis=1).sum())
        with np.errstate(all="ignore"):
            wide = true.astype(np.float64)
            error = np.abs(kept.astype(np.float64) - wide)
            self._largest = float(np.fmax(self._largest, np.fmax.reduce(error, axis=None, initial=0.0)))
            self._error += float(np.nansum(error * error))
            self._norm += float(np.nansum(wide * wide))
            if before is not None:
                old = before.astype(np.float64)
                true_change, change = (_finite(values - old) for values in (wide, kept.astype(np.float64)))
                self._change += float((true_change**2).sum())
                self._along += float((true_change * change).sum())

    def loss(self, promised: Mapping[str, float] | None = None) -> Loss | None:
        """None if every bit is as it was saved; else the numbers that `docs/format.md` names, and what was promised."""
        if not self._differing:
            return None
        said = {"differing": self._differing, "elements": self._elements, "max_abs": self._largest}
        said["rel"] = sqrt(self._error / self._norm) if self._norm else 0.0
        if self._change:
            said |= {"rel_change": sqrt(self._error / self._change), "progress": self._along / self._change}
        return said | dict(promised or {})


def _finite(values: Array) -> Array:
    """With zeros for what is no number."""
    return np.where(np.isfinite(values), values, 0.0)


def worst(losses: list[Loss]) -> Loss:
    """Of the losses of several tensors, together: sums of counts, the least progress, the largest of all else."""
    said: dict[str, int | float] = {}
    for loss in losses:
        for key, value in loss.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                said[key] = _TOGETHER.get(key, max)(said[key], value) if key in said else value
    return said
