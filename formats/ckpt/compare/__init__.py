"""The differences of two checkpoints, of any engines and layouts.

`select` chooses the tensors, `pairs` compares them, `sums` has the figures of two tensors, and `values` compares all
other values. `groups` adds figures up, `to_json` returns all of it as plain data.
"""

from collections.abc import Sequence

from ckpt.compare.pairs import Diff, TensorDiff, TensorPairs, compare, pair_tensors
from ckpt.compare.select import Selection, select_both
from ckpt.compare.sums import DiffSums, Histogram, diff_sums
from ckpt.job import AnyProgress, count_to, load_kernels
from ckpt.pipeline import Resources, check_complete
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.identity import check_unchanged
from ckpt_formats.registry.encoded import uses_codecs

__all__ = [
    "Diff",
    "DiffSums",
    "Histogram",
    "Selection",
    "TensorDiff",
    "TensorPairs",
    "compare",
    "diff",
    "diff_selected",
    "diff_sums",
    "pair_tensors",
    "select_both",
]


@checked
def diff(
    first: Checkpoint,
    second: Checkpoint,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    states: Sequence[str] = (),
    *,
    tensors_only: bool = False,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> Diff:
    """Everything that differs between two checkpoints, whatever their formats and layouts. Reads each byte once.

    `only` and `skip` are patterns of names, `states` names of states (`model`, `master`, `exp_avg`, ...). With
    `tensors_only`, extras, counters and the optimizer's options are left out. Raises `NoMatchError` for a pattern that
    matches nothing, `IncompleteError` or `CorruptError` if a checkpoint is incomplete or damaged.
    """
    a, b = select_both(first, second, Selection(tuple(only), tuple(skip), extras=not tensors_only))
    return diff_selected(a, b, states, tensors_only, resources or Resources.of_machine(), progress)


def diff_selected(
    first: Checkpoint,
    second: Checkpoint,
    states: Sequence[str],
    tensors_only: bool,
    resources: Resources,
    progress: AnyProgress | None,
    figures: bool = True,
) -> Diff:
    """Everything that differs between two checkpoints that `select_both` returned.

    Without `figures`, of tensors whose bits are all equal only the elements are counted.
    """
    for checkpoint in (first, second):
        check_complete(checkpoint)
    pairs = pair_tensors(first, second, states)
    if uses_codecs(first) or uses_codecs(second):
        load_kernels()
    result = compare(pairs, resources, count_to(pairs.nbytes, progress), tensors_only, figures)
    for checkpoint in (first, second):
        check_unchanged(checkpoint.identities)
    return result
