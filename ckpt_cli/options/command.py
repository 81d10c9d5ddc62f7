"""Parts of all commands: the help text, `-v`, `--json`, and options for the resources of the machine."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_cli.options.groups import GroupedCommand, with_options
from ckpt_cli.options.types import LocalTarget, ShardType, SizeType, numbers
from ckpt_formats.core.arguments import Workers
from ckpt_formats.core.text import list_names, printable

F = TypeVar("F", bound=Callable[..., Any])

_TEXTS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "help")


def help_text(name: str) -> str:
    """The help text of a command: `ckpt_cli/help/NAME.txt`."""
    with open(os.path.join(_TEXTS, f"{name}.txt"), encoding="utf-8") as file:
        return file.read().replace("\\b\n", "\b\n")


_MAX_SHOWN = 8
_FILES = " If these are files of one checkpoint, name their folder."
_SEVERAL = {
    "convert": f"{_FILES} The mean of several checkpoints is `ckpt average`.",
    "reshard": _FILES,
    "compress": _FILES,
}
"""What else may have been meant by several paths, by command."""


ORDERED = frozenset(("append", "average", "merge", "merge-lora"))
"""The commands whose arguments are of several kinds, or of any number."""


class PathsCommand(GroupedCommand):
    """Names the paths that are too many, for example from a pattern of the shell."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        ctx.meta["ckpt.words"] = (str(ctx.info_name), *args)  # `ckpt commit` repeats them
        rest = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            own = [param for param in self.params if isinstance(param, click.Argument)]
            places = " and one ".join(param.make_metavar(ctx).strip("[]") for param in own)
            given = [str(ctx.params.get(param.name or "")) for param in own] + list(map(str, ctx.args))
            shown = list_names(given, printable, _MAX_SHOWN)
            hint = _SEVERAL.get(self.name or "", "")
            if not own:
                ctx.fail(f"{self.name} takes options only, but is given {shown}.")
            ctx.fail(f"one {places} at a time, but {len(given)} paths are given: {shown}.{hint}")
        if self.name in ORDERED and not ctx.resilient_parsing:
            from ckpt_cli.options.argument_order import check_order

            check_order(str(self.name), _paths(self, ctx), ctx.meta["ckpt.words"][1:])
        return rest


def _paths(command: click.Command, ctx: click.Context) -> list[str]:
    """The arguments that were given, in their order."""
    values = [ctx.params.get(one.name or "") for one in command.params if isinstance(one, click.Argument)]
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    return [str(one) for value in several for one in value]


def command(name: str, as_json: bool = True) -> Callable[[Callable[..., None]], click.Command]:
    """A command with its help text, with `-v`, `-q` and, if `as_json`, `--json`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        if as_json:
            function = _json(function)
        return click.command(name, cls=PathsCommand, help=help_text(name))(_verbose(_quiet(function)))

    return decorate


_verbose = click.option(
    "-v", "--verbose", is_flag=True, expose_value=False, help="Show all names in notes, and the traceback of an error."
)
_quiet = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    help="Print no notes and no progress, only the result and errors.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with notes and errors in it.")

dry_run = click.option("--dry-run", is_flag=True, help="Check everything and print the plan, write nothing.")


html = click.option("--html", type=LocalTarget(dir_okay=False), metavar="FILE", help="Write a page for a browser.")

_MEMORY = click.option(
    "--memory",
    type=SizeType(),
    default="256M",
    show_default=True,
    help="Memory for tensor data, of all threads together.",
)
_SCRATCH = click.option(
    "--scratch",
    type=LocalTarget(file_okay=False),
    help="For a TARGET in a store: folder for files until they are uploaded.  [default: $TMPDIR]",
)
_WORKERS = click.option(
    "--workers", type=numbers(Workers), default=None, help="Threads.  [default: one per core, at most 8]"
)


_NO_LOCK = click.option(
    "--no-lock",
    is_flag=True,
    help="Write even without file locks or conditional puts. You guarantee that nothing else writes TARGET.",
)
_READ_BACK = click.option(
    "--read-back",
    is_flag=True,
    help="For a TARGET in a store: read back all that was uploaded, also what the store's ETag proves.",
)
_EXECUTOR = click.option(
    "--executor",
    metavar="URL",
    help="Let the workers of a cluster write the files: dask://HOST:PORT, ray://HOST:PORT, or ray:// here.",
)
_SHARD = click.option(
    "--shard",
    type=ShardType(),
    help="Write only share i of N, counted from 0; auto: as in the job array; auto/N: the array's number, of N.",
)


def resources(locks: bool = True, scales_out: bool = False, writes: bool = True) -> Callable[[F], F]:
    """`--workers`, `--memory`, `--scratch`, `--no-lock` and `--read-back`; the command gets them as one `Resources`.

    `scales_out`: also `--executor` and `--shard`. `locks`: the command writes a target, or replays a chain; `writes`:
    it writes a target.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def wrapper(
            *args: Any,
            workers: int | None,
            memory: int,
            no_lock: bool = False,
            executor: str | None = None,
            shard: Any = None,
            scratch: str | None = None,
            read_back: bool = False,
            **arguments: Any,
        ) -> Any:
            from pathlib import Path

            from ckpt.pipeline.resources import Execution, Resources

            if executor is not None and shard is not None:
                raise click.UsageError("--executor and --shard are two ways to do the same: give one of them.")
            folder = Path(scratch) if scratch else None
            machine = Resources.of_machine(workers, memory, folder)
            given = Execution.of(machine, locks=not no_lock, executor=executor, shard=shard, read_back=read_back)
            return function(*args, resources=given, **arguments)

        of_target = (_NO_LOCK, *((_READ_BACK,) if writes else ()), _SCRATCH) if locks else ()
        options = with_options(wrapper, *of_target, _MEMORY, _WORKERS)
        return cast(F, with_options(options, _EXECUTOR, _SHARD, group="Many machines") if scales_out else options)

    return decorate
