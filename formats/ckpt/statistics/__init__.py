"""Figures of the values of a checkpoint: NaN, infinity and zeros, extremes, mean, norm, and a histogram of sizes.

`figures` has those of arrays, `measure` reads the tensors of a checkpoint, and `result` is what was found.
"""

from ckpt.statistics.figures import Figures
from ckpt.statistics.measure import stats
from ckpt.statistics.result import Stats, TensorStats

__all__ = ["Figures", "Stats", "TensorStats", "stats"]
