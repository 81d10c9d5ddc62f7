"""Options of `stats`: what is measured, and how it is shown."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.command import html
from ckpt_cli.options.groups import take_options, with_options
from ckpt_cli.options.param_type import ParamType
from ckpt_cli.options.source import only, skip

F = TypeVar("F", bound=Callable[..., Any])

STRANGE = ("nan", "inf")


class StrangeType(ParamType[tuple[str, ...]]):
    """Kinds of values with commas between them: `nan,inf`."""

    name = "kinds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        kinds = tuple(str(value).lower().split(","))
        if not all(kind in STRANGE for kind in kinds):
            self.fail(f"{value!r:.60} is not nan, inf or nan,inf", param, ctx)
        return kinds


@dataclass(frozen=True)
class StatsOptions:
    """Which tensors are measured, and how the figures are shown."""

    only: tuple[str, ...]
    skip: tuple[str, ...]
    states: tuple[str, ...]
    by: str
    top: int
    fail_on: tuple[str, ...]
    as_csv: bool
    html: str | None


def stats_options(command: F) -> F:
    """The options of `stats`; the command gets them as one `StatsOptions`."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        how = take_options(StatsOptions, arguments)
        if how.as_csv and arguments["as_json"]:
            raise click.UsageError("--csv and --json both say how the figures are printed: give one of them.")
        return command(*args, how=how, **arguments)

    return cast(
        F,
        with_options(
            wrapper,
            only,
            skip,
            click.option(
                "--state",
                "states",
                multiple=True,
                metavar="STATE",
                help="Measure this state only: model, master, exp_avg, ... May be given again.",
            ),
            click.option(
                "--by",
                type=click.Choice(["tensor", "layer", "role", "state"]),
                default="tensor",
                show_default=True,
                help="One row for each of these, and for each of its states.",
            ),
            click.option(
                "--top",
                type=click.IntRange(0),
                default=40,
                show_default=True,
                help="Rows to show; 0 shows all. --csv and --json have all.",
            ),
            click.option(
                "--fail-on",
                type=StrangeType(),
                default=(),
                metavar="KINDS",
                help="End with exit code 1 if there are such values: nan, inf, or nan,inf.",
            ),
            click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV."),
            html,
            group="Report",
        ),
    )
