"""Which checkpoints of a run stay: by their number, their times and their steps, as backups are kept."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ckpt_formats.core.errors import InvalidArgumentError

_RULE = re.compile(r"(last|hourly|daily|weekly|monthly|yearly|every):([1-9][0-9]{0,17})|best")
_WORDS = "last:N, hourly:N, daily:N, weekly:N, monthly:N, yearly:N, every:N or best"

_PERIODS: dict[str, Callable[[datetime], object]] = {
    "hourly": lambda time: (time.date(), time.hour),
    "daily": lambda time: time.date(),
    "weekly": lambda time: time.isocalendar()[:2],
    "monthly": lambda time: (time.year, time.month),
    "yearly": lambda time: time.year,
}
"""What two times have in common that are in one period."""


@dataclass(frozen=True)
class SavedStep:
    """A whole checkpoint, as rules look at it."""

    path: Path
    step: int | None
    modified: float
    """When the last of its files was written, in seconds since 1970."""


def parse_keep(text: str) -> list[tuple[str, int]]:
    """The rules in a text such as `last:3,daily:7`, as (kind, number). Raises `InvalidArgumentError`."""
    rules = list[tuple[str, int]]()
    for part in text.split(","):
        match = _RULE.fullmatch(part.strip())
        if match is None:
            what = f"{part.strip()!r:.60} is not a rule for what to keep"
            raise InvalidArgumentError(what, hint=f"A rule is {_WORDS}; several have commas between them.")
        rules.append(("best", 1) if match[1] is None else (match[1], int(match[2])))
    return rules


def kept_by(rules: Sequence[tuple[str, int]], newest_first: Sequence[SavedStep], best: str | None) -> dict[Path, str]:
    """The checkpoints that rules keep, each with the rules that do so. `best`: the name of the best one, if known.

    A rule of times keeps the newest checkpoint of each of the last N periods in which there is one, in UTC.
    """
    reasons: dict[Path, list[str]] = {}
    for kind, number in rules:
        for one in _chosen(kind, number, newest_first, best):
            reasons.setdefault(one.path, []).append(kind if kind in ("best", *_PERIODS) else f"{kind}:{number}")
    return {path: ", ".join(kinds) for path, kinds in reasons.items()}


def _chosen(kind: str, number: int, newest_first: Sequence[SavedStep], best: str | None) -> Sequence[SavedStep]:
    if kind == "last":
        return newest_first[:number]
    if kind == "every":
        return [one for one in newest_first if one.step is not None and one.step % number == 0]
    if kind == "best":
        return [one for one in newest_first if one.path.name == best]
    period = _PERIODS[kind]
    chosen: dict[object, SavedStep] = {}
    for one in newest_first:
        chosen.setdefault(period(datetime.fromtimestamp(one.modified, timezone.utc)), one)
    return list(chosen.values())[:number]
