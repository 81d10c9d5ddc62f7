"""Options that several commands share, and the values they parse into."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

MOST_RANKS = 1 << 16
"""Along one dimension: more than any machine has, and few enough to plan for each."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Bytes(click.ParamType[int]):
    """A size such as `512M`: binary units, with or without a final B."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", str(value).strip().lower())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size like 512M or 2G", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\d+(,\d+)*", str(value)):
            self.fail(f"{value!r} is not a list of numbers like 0,4,8", param, ctx)
        return tuple(map(int, str(value).split(",")))


def common(command: F) -> F:
    """`-v`, of every command."""
    return click.option("-v", "--verbose", is_flag=True, expose_value=False, help="Show where an error came from.")(
        command
    )


def as_json(command: F) -> F:
    """`--json`, of every command that prints data."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")(command)


def effort(command: F) -> F:
    """`--workers` and `--memory`, of every command that moves tensors."""
    workers = click.option(
        "--workers", type=click.IntRange(1, 256), default=None, help="Threads.  [default: one per core, at most 8]"
    )
    memory = click.option(
        "--memory", type=Bytes(), default="256M", show_default=True, help="Tensor data held at once, by all threads."
    )
    return workers(memory(command))


def rules(command: F) -> F:
    """`--rules`, of every command that reads a checkpoint."""
    return click.option(
        "--rules",
        "rules_file",
        type=click.Path(dir_okay=False, readable=False),
        help="TOML file that says how tensor-parallel tensors are cut.",
    )(command)
