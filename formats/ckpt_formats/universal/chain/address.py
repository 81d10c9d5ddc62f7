"""Addresses of single states of a chain: `run.chain@1234`, `@last`, `@last~10`; of a family of models: `@NAME`."""

import re
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.universal.chain import chain_file

_ADDRESS = re.compile(
    rf"(?P<run>.+)@(?:(?P<step>\d{{1,18}})|(?P<last>last(?:~(?P<back>\d{{1,18}}))?)|(?P<name>{chain_file.MODEL_NAME.pattern}))",
    re.DOTALL,
)


@dataclass(frozen=True)
class Address:
    """The address of a state of a chain."""

    run: Path
    step: int | None
    """None: count from the last step."""
    back: int = 0
    """How many steps before the last."""
    name: str | None = None
    """The name of a model of a family."""


def parse(path: Path) -> Address | None:
    """The state that a path names; None if it names no state of a chain, or if the path itself exists.

    >>> parse(Path("step@5")) is None
    True
    """
    match = _ADDRESS.fullmatch(path.name)
    if match is None or path.exists() or not ((run := path.with_name(match["run"])) / chain_file.NAME).is_file():
        return None
    step = match["step"]
    return Address(run, None if step is None else int(step), int(match["back"] or 0), match["name"])
