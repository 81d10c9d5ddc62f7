"""The model that `check` compares with: a configuration, another checkpoint, or a file of names."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.types import CheckpointPath

F = TypeVar("F", bound=Callable[..., Any])

_LIKE = click.option(
    "--like",
    type=CheckpointPath(),
    required=True,
    metavar="MODEL",
    help="The model: its config.json, another checkpoint, or a file of names, one on each line.",
)


def model_option(command: F) -> F:
    """`--like`; the command gets its path as `like`, and as `model` what is there."""

    @wraps(command)
    def opened(*args: Any, like: str, **arguments: Any) -> Any:
        from ckpt_cli.reading import open_model

        return command(*args, like=like, model=open_model(like), **arguments)

    return cast(F, with_options(opened, _LIKE))
