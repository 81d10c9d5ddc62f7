"""The step of a checkpoint, compared over the places that state it: its content, its folder's name, its optimizer."""

import re
from collections.abc import Iterator
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import read
from ckpt_formats.core.text import printable

_IN_NAME = re.compile(
    r"(?:.*[._=-])?(?:global[_-]?)?(?:steps?|iter|iteration|checkpoint(?=-))[_=-]?0*(\d{1,15})(?:\D.*)?", re.IGNORECASE
)
"""`global_step20`, `step-20`, `iter_0000020`, `checkpoint-20`, `epoch=1-step=20.ckpt`; `checkpoint_3` of Accelerate is
the number of a save."""
_COUNT = "step"
_MAX_LOOKED_AT = 64


def contradicting_steps(checkpoint: Checkpoint, path: Path) -> Iterator[Notice]:
    """Notices if the name of the checkpoint, or its optimizer, states another step than its content.

    `path`: the file or folder of the checkpoint itself.
    """
    named, step = _in_name(path), checkpoint.origin.step
    if named is None or step is None:
        return
    name = printable(path.absolute().name)
    if named != step:
        text = f"the step is {step:,} by what was saved, but {named:,} by the name {name}"
        yield Notice(text, weight=Weight.UNSURE)
    elif checkpoint.origin.engine == "dcp" and (count := _optimizer_count(checkpoint)) not in (None, step):
        text = f"the step is {step:,} by the name {name}, but the optimizer counts {count:,} steps"
        yield Notice(text, weight=Weight.UNSURE)


def _in_name(path: Path) -> int | None:
    match = _IN_NAME.fullmatch(path.absolute().name)
    return None if match is None else int(match[1])


def _optimizer_count(checkpoint: Checkpoint) -> int | None:
    """The steps that the optimizer counts for the first parameter that has a count; None if it has none."""
    for parameter, _ in zip(checkpoint.parameters.values(), range(_MAX_LOOKED_AT), strict=False):
        value = parameter.values.get(_COUNT)
        if isinstance(value, (int, float)):
            return int(value)
        tensor = parameter.states.get(_COUNT)
        if tensor is not None and tensor.shape == ():
            try:
                return int(read(tensor))
            except (CkptError, ValueError, OverflowError):
                return None
    return None
