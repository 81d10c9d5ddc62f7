"""The differences of two checkpoints, of any engines and layouts.

`checkpoints` chooses the parameters, `pairs` compares their tensors, `sums` has the figures of two tensors, and
`values` compares all other values. `result` is what was found, `to_json` returns it as plain data.
`fitting` compares a checkpoint with what a model expects, `statistics` measures the values of one checkpoint.
"""

from ckpt.compare.checkpoints import Selection, diff, diff_each, diff_selected, each_selected, select_both, select_each
from ckpt.compare.pairs import TensorPairs, compare, mastered_names, pair_tensors
from ckpt.compare.result import Diff, TensorDiff, ValueDiff
from ckpt.compare.sums import DiffSums, Histogram, diff_sums

__all__ = [
    "Diff",
    "DiffSums",
    "Histogram",
    "Selection",
    "TensorDiff",
    "TensorPairs",
    "ValueDiff",
    "compare",
    "diff",
    "diff_each",
    "diff_selected",
    "diff_sums",
    "each_selected",
    "mastered_names",
    "pair_tensors",
    "select_both",
    "select_each",
]
