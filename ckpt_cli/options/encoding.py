"""Options of `compress`: how states are encoded."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_formats.core.encoding import LEVELS

F = TypeVar("F", bound=Callable[..., Any])


def encoding(command: F) -> F:
    """`--codec`, `--level` and `--no-check`; the command gets them as fields of the universal format."""

    @wraps(command)
    def wrapper(*args: Any, codec: str, level: str, no_check: bool, **arguments: Any) -> Any:
        return command(*args, encoding={"codec": codec, "level": level, "check": not no_check}, **arguments)

    return cast(
        F,
        with_options(
            wrapper,
            click.option(
                "--codec",
                default="auto",
                show_default=True,
                metavar="NAME[:OPTION=VALUE,...]",
                help="One codec for all states that it can encode, instead of the best for each.",
            ),
            click.option(
                "--level",
                type=click.Choice(list(LEVELS)),
                default="default",
                show_default=True,
                help="Time against size. max takes up to twice as long, and floats become 0.1-0.5 % smaller.",
            ),
            click.option("--no-check", is_flag=True, help="Do not decode and compare what was encoded."),
            group="Codec",
        ),
    )
