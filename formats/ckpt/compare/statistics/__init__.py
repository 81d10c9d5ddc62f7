"""Figures of the values of a checkpoint: NaN, infinity and zeros, extremes, mean, norm, and a histogram of sizes.

`figures` has those of arrays, `measure` reads the tensors of a checkpoint, and `result` is what was found.
"""

from ckpt.compare.statistics.figures import Figures
from ckpt.compare.statistics.measure import stats
from ckpt.compare.statistics.result import Stats, TensorStats

__all__ = ["Figures", "Stats", "TensorStats", "stats"]
