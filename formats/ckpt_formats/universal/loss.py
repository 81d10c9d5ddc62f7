"""How far values that were kept are from those that were saved."""

from math import sqrt

import numpy as np

from ckpt_formats.base import Loss
from ckpt_formats.tensor import Array


class Measure:
    """Adds up, over the chunks of one state, what was lost."""

    def __init__(self) -> None:
        self._differing = self._elements = 0
        self._largest = self._error = self._change = self._norm = 0.0

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
                self._change += float(np.nansum((wide - before) ** 2))

    def loss(self) -> Loss | None:
        """None if every bit is as it was saved; else the numbers that `docs/format.md` names."""
        if not self._differing:
            return None
        said = {"differing": self._differing, "elements": self._elements, "max_abs": self._largest}
        said["rel"] = sqrt(self._error / self._norm) if self._norm else 0.0
        return said | ({"rel_change": sqrt(self._error / self._change)} if self._change else {})


def worst(losses: list[Loss]) -> Loss:
    """Of the losses of several tensors, together: sums of the counts, and the largest of all else."""
    said: dict[str, int | float] = {}
    for loss in losses:
        for key, value in loss.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                counted = key in ("differing", "elements")
                said[key] = said.get(key, 0) + value if counted else max(said.get(key, value), value)
    return said
