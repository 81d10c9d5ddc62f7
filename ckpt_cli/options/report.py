"""Options of the report of `diff`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.command import html
from ckpt_cli.options.groups import take_options, with_options
from ckpt_cli.options.source import only, skip

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ReportOptions:
    """Which tensors are compared, and how the differences are shown."""

    only: tuple[str, ...]
    skip: tuple[str, ...]
    states: tuple[str, ...]
    tensors_only: bool
    sort: str
    by: tuple[str, ...]
    top: int
    html: str | None


def report_options(command: F) -> F:
    """The options of the report; the command gets them as one `ReportOptions`."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        return command(*args, report=take_options(ReportOptions, arguments), **arguments)

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
                help="Compare this state only: model, master, exp_avg, ...",
            ),
            click.option(
                "--tensors-only", is_flag=True, help="Leave out extras, counters and the optimizer's options."
            ),
            click.option(
                "--sort",
                type=click.Choice(["relative", "max", "rms", "changed", "cosine", "name"]),
                default="relative",
                show_default=True,
                help="Order of the rows.",
            ),
            click.option(
                "--by",
                type=click.Choice(["layer", "role", "state", "kind"]),
                multiple=True,
                help="Also show sums over tensors. Given twice: by both together.",
            ),
            click.option(
                "--top", type=click.IntRange(0), default=20, show_default=True, help="Rows to show; 0 shows all."
            ),
            html,
            group="Report",
        ),
    )
