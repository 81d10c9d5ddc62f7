"""The error figures of states whose values differ from those that were to be saved, as a manifest stores them."""

from collections.abc import Callable, Mapping
from operator import add
from typing import TYPE_CHECKING

from ckpt_formats.core.checkpoint import OLDER, OLDEST_STEP, ErrorFigures

if TYPE_CHECKING:
    from ckpt_codecs import lossy

_COMBINE: Mapping[str, Callable[[float, float], float]] = {
    "differing": add,
    "elements": add,
    "progress": min,
    OLDER: add,
    OLDEST_STEP: min,
}
"""How two values of a figure are combined, where the result is not the larger one."""


def figures(
    measured: "lossy.ErrorStats", changed: bool, promised: Mapping[str, float] | None = None
) -> ErrorFigures | None:
    """The figures that `docs/format.md` names, and those in `promised`; None if all bits are equal.

    `changed`: whether there is an earlier state, to whose change the error can be compared.
    """
    if not measured.differing:
        return None
    result = {
        "differing": measured.differing,
        "elements": measured.elements,
        "max_abs": measured.max_abs,
        "rel": measured.of_values,
    }
    if changed and measured.change:
        result |= {"rel_change": measured.relative, "progress": measured.progress}
    return result | dict(promised or {})


def worst(errors: list[ErrorFigures]) -> ErrorFigures:
    """The figures of several tensors in one: sums of counts, the smallest progress, the largest of all others."""
    result: dict[str, int | float] = {}
    for error in errors:
        for key, value in error.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                result[key] = _COMBINE.get(key, max)(result[key], value) if key in result else value
    return result
