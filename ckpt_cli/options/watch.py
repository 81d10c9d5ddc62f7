"""The options of `watch`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.command import dry_run
from ckpt_cli.options.groups import with_options
from ckpt_cli.options.types import DurationType

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class WatchOptions:
    """How long a run is watched, and what stays of it."""

    keep: str | None
    interval: float
    """Seconds between two looks."""
    once: bool
    timeout: float | None
    """Seconds after which the watch ends, if nothing has become whole."""
    dry_run: bool


_OPTIONS = (
    click.option(
        "--keep",
        metavar="RULES",
        help="Then prune the run: which checkpoints stay, as in `ckpt prune`. Only what TARGET has may go.",
    ),
    click.option(
        "--interval",
        type=DurationType(),
        default="5s",
        show_default=True,
        help="Time between two checks. A checkpoint whose files do not change for so long may be complete.",
    ),
    click.option("--once", is_flag=True, help="End when the checkpoints that are complete now are stored: for cron."),
    click.option(
        "--timeout", type=DurationType(), help="End when no new checkpoint is complete for so long.  [default: never]"
    ),
    dry_run,
)


def watch_options(function: F) -> F:
    """The options of a watch; the command gets them as one `WatchOptions`."""

    @wraps(function)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        given = WatchOptions(**{name: arguments.pop(name) for name in WatchOptions.__dataclass_fields__})
        if given.interval <= 0 or (given.timeout is not None and given.timeout <= 0):
            raise click.UsageError("--interval and --timeout are longer than nothing, such as 5s")
        return function(*args, given=given, **arguments)

    return cast(F, with_options(wrapper, *_OPTIONS))
