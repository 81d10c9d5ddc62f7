"""What differs between two checkpoints, whatever engines and layouts wrote them.

`choice` says what is compared, `pairs` compares it, `sums` is what is told of two
tensors and `values` of all else. `groups` adds up, `facts` says it all as plain
data; `report` prints it, `page` draws it.
"""

from ckpt.compare.pairs import Diff, TensorDiff, TensorPairs, compare, pair_tensors
from ckpt.compare.select import Selection, select_both
from ckpt.compare.sums import DiffSums, Histogram, diff_sums

__all__ = [
    "Diff",
    "DiffSums",
    "Histogram",
    "Selection",
    "TensorDiff",
    "TensorPairs",
    "compare",
    "diff_sums",
    "pair_tensors",
    "select_both",
]
