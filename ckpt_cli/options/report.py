"""What `diff` shows."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeVar, cast

import click

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ReportOptions:
    """Which tensors are compared, and how the differences are shown."""

    states: tuple[str, ...]
    tensors_only: bool
    sort: str
    by: tuple[str, ...]
    top: int
    html: str | None


def report_options(command: F) -> F:
    """The options of the report; the command gets them as one `ReportOptions`."""

    @wraps(command)
    def gathered(*args: Any, **others: Any) -> Any:
        own = {field.name: others.pop(field.name) for field in fields(ReportOptions)}
        return command(*args, report=ReportOptions(**own), **others)

    decorated: Any = gathered
    for option in (
        click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page for a browser."),
        click.option("--top", type=click.IntRange(0), default=20, show_default=True, help="Rows to show; 0 for all."),
        click.option(
            "--by",
            type=click.Choice(["layer", "role", "state", "kind"]),
            multiple=True,
            help="Add tensors up, too. Twice: by both together.",
        ),
        click.option(
            "--sort",
            type=click.Choice(["relative", "max", "rms", "changed", "cosine", "name"]),
            default="relative",
            show_default=True,
            help="Which come first.",
        ),
        click.option("--tensors-only", is_flag=True, help="Leave out extras, counters and the optimizer's options."),
        click.option(
            "--state", "states", multiple=True, metavar="STATE", help="Compare this state only: weight, exp_avg, ..."
        ),
    ):
        decorated = option(decorated)
    return cast(F, decorated)
