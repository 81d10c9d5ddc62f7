"""Options of `verify`: how thoroughly what is checked."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.source import Choice, choosing

F = TypeVar("F", bound=Callable[..., Any])

_REPLAY = click.option("--replay", is_flag=True, help="Repeat all logged steps of a chain, and compare with the run.")
_QUICK = click.option("--quick", is_flag=True, help="Check only what the headers of the files say; read no tensor.")
_VALUES = click.option("--values", is_flag=True, help="Read all values for NaN and zeros, also without checksums.")


@dataclass(frozen=True)
class How:
    """How thoroughly a checkpoint is checked."""

    replay: bool
    """Whether the logged steps of a chain are repeated, and compared with the run."""
    quick: bool
    """Whether only headers are read."""
    values: bool
    """Whether all values are read, to count those that are NaN or infinite."""
    choice: Choice
    """The parameters that are checked."""


def thoroughness(command: F) -> F:
    """`--replay`, `--quick`, `--values`, `--only` and `--skip`; the command gets them as one `How`."""

    @wraps(command)
    def wrapper(*args: Any, replay: bool, quick: bool, values: bool, choice: Choice, **arguments: Any) -> Any:
        if quick and replay:
            raise click.UsageError("--quick reads headers only, and --replay repeats all steps: give one of them.")
        if values and (quick or replay):
            raise click.UsageError("--values reads all values of one checkpoint: leave --quick and --replay out.")
        if replay and choice:
            raise click.UsageError("--replay repeats steps of all parameters: leave --only and --skip out.")
        return command(*args, how=How(replay, quick, values, choice), **arguments)

    return cast(F, with_options(choosing(wrapper), _REPLAY, _QUICK, _VALUES))
