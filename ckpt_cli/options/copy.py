"""The options of `copy`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.command import dry_run
from ckpt_cli.options.groups import with_options
from ckpt_cli.options.target import protecting

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Copied:
    """What is copied, and how often."""

    everything: bool
    updates: bool
    """Whether a copy of a chain is brought to what the chain is now."""
    every: float | None
    """Seconds from one time to the next; None: once."""
    dry_run: bool
    protect: int | None
    """How many files of the copy parity shall replace; None: none is written."""


_ALL = click.option("--all", "everything", is_flag=True, help="Copy also files that are not part of the checkpoint.")
_UPDATE = click.option(
    "--update", is_flag=True, help="Sync TARGET, an existing copy in a store, with the chain SOURCE."
)
_FOLLOW = click.option("--follow", is_flag=True, help="Sync again and again, until the recorded run ends.")
_EVERY = click.option(
    "--every", type=click.FloatRange(min=0.1), default=30.0, show_default=True, help="Seconds between two syncs."
)


def copied(function: F) -> F:
    """`--all`, `--update`, `--follow`, `--every` and `--dry-run`; the command gets them as one `Copied`."""

    @wraps(function)
    def wrapper(
        *args: Any,
        everything: bool,
        update: bool,
        follow: bool,
        every: float,
        dry_run: bool,
        protect: int | None,
        **arguments: Any,
    ) -> Any:
        if protect is not None and (update or follow):
            raise click.UsageError("--protect writes parity of a complete copy: leave out --update and --follow.")
        if (update or follow) and (everything or dry_run):
            raise click.UsageError("--update and --follow take neither --all nor --dry-run")
        given = Copied(everything, update or follow, every if follow else None, dry_run, protect)
        return function(*args, copied=given, **arguments)

    return cast(F, with_options(wrapper, _ALL, _UPDATE, _FOLLOW, _EVERY, protecting, dry_run))
