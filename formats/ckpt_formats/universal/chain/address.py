"""Addresses of single states of a chain: `run.chain@1234`, `@last`, `@last~10`."""

import re
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.universal.chain import chain_file

_ADDRESS = re.compile(r"(.+)@(?:(\d{1,18})|last(?:~(\d{1,18}))?)", re.DOTALL)


@dataclass(frozen=True)
class Address:
    """The address of a state of a chain."""

    run: Path
    step: int | None
    """None: count from the last step."""
    back: int = 0
    """How many steps before the last."""


def parse(path: Path) -> Address | None:
    """The state that a path names; None if it names no state of a chain, or if the path itself exists.

    >>> parse(Path("step@5")) is None
    True
    """
    match = _ADDRESS.fullmatch(path.name)
    if match is None or path.exists() or not ((run := path.with_name(match[1])) / chain_file.NAME).is_file():
        return None
    if match[2] is not None:
        return Address(run, int(match[2]))
    return Address(run, None, int(match[3] or 0))
