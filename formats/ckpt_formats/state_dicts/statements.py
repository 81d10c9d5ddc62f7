"""Numbers and texts that a checkpoint states in several places, such as its step. All places must agree."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, is_natural

MIXED = "Files of several steps or runs were mixed: copy all files of one step again."
_MAX_SHOWN = 60


@dataclass(frozen=True)
class Statement:
    """The value that one place, such as "`global_steps` in a.pt", states for a fact, such as "the step"."""

    fact: str
    where: str
    value: Value
    """None: this place states no value."""


def check_agreement(statements: Iterable[Statement], folder: Path, hint: str = MIXED) -> None:
    """Raise `CorruptError` if two places state different values for the same fact."""
    first: dict[str, Statement] = {}
    for one in statements:
        if one.value is None:
            continue
        other = first.setdefault(one.fact, one)
        if other.value != one.value:
            raise CorruptError(
                f"{one.fact} is {_short(other.value)} in {other.where} but {_short(one.value)} in {one.where}",
                where=folder,
                hint=hint,
            )


def whole(value: Value) -> int | None:
    """The value if it is an integer from 0; else None."""
    return int(value) if is_natural(value) else None


def step_in_name(folder: Path, pattern: re.Pattern[str], fact: str = "the step") -> Statement:
    """The step in the name of a folder. Group 1 of `pattern`, which must match the full name, is the number."""
    match = pattern.fullmatch(folder.absolute().name)
    return Statement(
        fact, f"the name of the folder {printable(folder.absolute().name)}", int(match[1]) if match else None
    )


def _short(value: Value) -> str:
    return printable(str(value)[:_MAX_SHOWN])
