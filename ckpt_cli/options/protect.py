"""The options of `protect` and `repair`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.groups import take_options, with_options
from ckpt_cli.options.types import CheckpointPath, FileToRead

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ProtectOptions:
    """What may be lost, and where parity lies."""

    lose: int
    by: str
    domains: Path | None
    jump: int
    into: tuple[str, ...]
    overwrite: bool


@dataclass(frozen=True)
class RepairOptions:
    """Where copies of files are, and where parity is."""

    others: tuple[str, ...]
    parity: tuple[str, ...]


_LOSE = click.option(
    "--lose",
    type=click.IntRange(1, 32),
    default=2,
    show_default=True,
    metavar="M",
    help="How many files, or nodes or folders with --by, may be lost.",
)
_BY = click.option(
    "--by",
    default="file",
    show_default=True,
    metavar="WHAT",
    help="What is lost together: file, folder (the first one in a path), node:N, the files of N ranks, or state, of a "
    "chain.",
)
_DOMAINS = click.option(
    "--domains",
    type=FileToRead(Path),
    metavar="FILE",
    help="Table of what is lost together: lines DOMAIN PATTERN. The first that matches a file counts.",
)
_JUMP = click.option(
    "--jump",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Divide into N groups that may lose M each; neighbouring ranks, which share a host, are in different ones.",
)
_INTO = click.option(
    "--into",
    type=CheckpointPath(),
    multiple=True,
    metavar="PLACE",
    help="Keep the parity in this folder or URL; given several times, in turn: on other disks or machines.",
)
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace parity that is there.")
_FROM = click.option(
    "--from",
    "others",
    type=CheckpointPath(),
    multiple=True,
    metavar="OTHER",
    help="Folder or URL with copies of the files, perhaps older ones, for what parity cannot replace.",
)
_PARITY = click.option(
    "--parity",
    type=CheckpointPath(),
    multiple=True,
    metavar="PLACE",
    help="The folders and URLs of --into, where they are now: nothing is read or written that you do not name.",
)


def protect_options(command: F) -> F:
    """The options of `protect`; the command gets them as one `ProtectOptions`."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        options = take_options(ProtectOptions, arguments)
        if options.domains is not None and options.by != "file":
            raise click.UsageError("--domains is a table of what is lost together: leave --by out.")
        return command(*args, options=options, **arguments)

    return cast(F, with_options(wrapper, _LOSE, _BY, _DOMAINS, _JUMP, _INTO, _OVERWRITE))


def repair_options(command: F) -> F:
    """The options of `repair`; the command gets them as one `RepairOptions`."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        return command(*args, options=take_options(RepairOptions, arguments), **arguments)

    return cast(F, with_options(wrapper, _FROM, _PARITY))
