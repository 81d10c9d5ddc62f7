"""The options of `follow`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.types import FileToRead, numbers
from ckpt_formats.core.arguments import Count, Positive

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class FollowOptions:
    """How far a chain is followed, and who hears of it."""

    once: bool
    step: int | None
    every: float
    notify: str | None
    command: str | None
    key: Path | None
    tp: int
    rank: int
    rules: Path | None


def follow_options(function: F) -> F:
    """The options of `follow`; the command gets them as one `FollowOptions`."""

    @wraps(function)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        own = {name: arguments.pop(name) for name in FollowOptions.__dataclass_fields__}
        return function(*args, options=FollowOptions(**own), **arguments)

    shards = with_options(
        wrapper,
        click.option(
            "--tp",
            type=numbers(Positive),
            default=1,
            metavar="N",
            help="Serve the shards of one of N tensor-parallel ranks, and read only what they need.",
        ),
        click.option("--rank", type=numbers(Count), default=0, metavar="R", help="Which rank: 0 to N - 1."),
        click.option(
            "--rules",
            type=FileToRead(Path),
            metavar="FILE",
            help="TOML file with the rules by which tensors are sharded; the names of Hugging Face's Llama family "
            "need none.",
        ),
        group="Shards",
    )
    readers = with_options(
        shards,
        click.option(
            "--notify",
            metavar="URL",
            help="POST each step to this URL, and wait for the answer: step, epoch, hash and path as JSON, and "
            "model_path and weight_version for SGLang.",
        ),
        click.option(
            "--exec",
            "command",
            metavar="CMD",
            help="Run this command of the shell for each step, with CKPT_STEP, CKPT_EPOCH, CKPT_HASH and CKPT_PATH "
            "in its environment.",
        ),
        group="Readers",
    )
    return cast(
        F,
        with_options(
            readers,
            click.option("--once", is_flag=True, help="Go to the last step, and end."),
            click.option(
                "--step",
                type=numbers(Count),
                help="Go to this step of the newest epoch, and end; if it is not published yet, wait for it.",
            ),
            click.option(
                "--every",
                type=click.FloatRange(min=0.01),
                default=0.2,
                show_default=True,
                help="Seconds between two checks for a step, where the store cannot wait for one.",
            ),
            click.option(
                "--key",
                type=FileToRead(Path),
                metavar="FILE",
                help="Refuse what is not signed with the key in this file.",
            ),
        ),
    )
