"""What a manifest says of states that are not as they were saved."""

from collections.abc import Callable, Mapping
from operator import add

from ckpt_codecs import lossy
from ckpt_formats.core.checkpoint import ErrorFigures

_TOGETHER: Mapping[str, Callable[[float, float], float]] = {"differing": add, "elements": add, "progress": min}


def figures(
    measured: lossy.ErrorStats, changed: bool, promised: Mapping[str, float] | None = None
) -> ErrorFigures | None:
    """None if every bit is as it was saved; else the numbers that `docs/format.md` names, and what was promised.

    `changed` is whether there was a state before, to which the error can be compared.
    """
    if not measured.differing:
        return None
    said = {
        "differing": measured.differing,
        "elements": measured.elements,
        "max_abs": measured.max_abs,
        "rel": measured.of_values,
    }
    if changed and measured.change:
        said |= {"rel_change": measured.relative, "progress": measured.progress}
    return said | dict(promised or {})


def worst(losses: list[ErrorFigures]) -> ErrorFigures:
    """Of the losses of several tensors, together: sums of counts, the least progress, the largest of all else."""
    said: dict[str, int | float] = {}
    for loss in losses:
        for key, value in loss.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                said[key] = _TOGETHER.get(key, max)(said[key], value) if key in said else value
    return said
