"""Options of the report of `diff`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.command import html
from ckpt_cli.options.groups import take_options, with_options
from ckpt_cli.options.source import only, skip
from ckpt_cli.options.types import LocalTarget

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
    table: bool
    csv: str | None

    def is_table(self, count: int, writes_delta: bool, as_json: bool) -> bool:
        """Whether so many checkpoints are shown as a table. Raises `UsageError` if that is not possible."""
        if count < 2:
            raise click.UsageError("a comparison needs two checkpoints or more, or a chain of several states.")
        is_table = self.table or self.csv is not None or count > 2
        if is_table and self.html is not None:
            raise click.UsageError("--html shows two checkpoints: give two, without --table and --csv.")
        if count > 2 and writes_delta:
            raise click.UsageError("-o writes the delta of two checkpoints: give two.")
        if self.csv == "-" and as_json:
            raise click.UsageError("--csv - and --json both print on standard output: give one of them.")
        return is_table


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
                type=click.Choice(["layer", "role", "state", "kind", "tensor"]),
                multiple=True,
                help="Also show sums over tensors. Given twice: by both together.",
            ),
            click.option(
                "--top", type=click.IntRange(0), default=20, show_default=True, help="Rows to show; 0 shows all."
            ),
            html,
            click.option(
                "--table",
                is_flag=True,
                help="A row for each checkpoint against the first; with --by, one for each group and the figure of "
                "--sort. Implied by more than two.",
            ),
            click.option(
                "--csv",
                type=LocalTarget(dir_okay=False, allow_dash=True),
                metavar="FILE",
                help="Write all figures of the table as CSV; - is standard output.",
            ),
            group="Report",
        ),
    )
