"""Options that several commands share, and the values they parse into."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ckpt_formats.registry import FORMATS, ONLY_READ
from ckpt_formats.state_dicts.keys import STYLES

F = TypeVar("F", bound=Callable[..., Any])

MOST_RANKS = 1 << 16
"""Along one dimension: more than any machine has, and few enough to plan for each."""

NAMINGS = ("hf", "megatron", "megatron-legacy")
"""Whose names tensors may have: Hugging Face's, Megatron core's, or those from before it."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class SizeType(click.ParamType[int]):
    """A size such as `512M`: binary units, with or without a final B."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", str(value).strip().lower())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size like 512M or 2G", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


class CheckpointPath(click.Path):
    """Where a checkpoint is, or is to be."""

    def __init__(self) -> None:
        super().__init__(readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail(
                "a checkpoint is read at many places of its files, and written as a whole: not through a pipe. "
                "Name a file or folder (./- if it is called that).",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class FloatType(click.ParamType[str]):
    """A floating-point type by one of its names."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ckpt_formats.core.dtypes import DTYPES, SHORT_NAMES, is_float

        dtype = DTYPES.get(SHORT_NAMES.get(value, value))
        if dtype is None or not is_float(dtype):
            known = ", ".join((*SHORT_NAMES, *(name for name, one in DTYPES.items() if is_float(one))))
            self.fail(f"{value!r:.60} is not a floating-point type; there are: {known}", param, ctx)
        return str(value)


class PathsCommand(click.Command):
    """Names the paths that are too many, as a shell's pattern may give them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            places = (param.make_metavar(ctx).strip("[]") for param in self.params if isinstance(param, click.Argument))
            ctx.fail(f"one {' and one '.join(places)} at a time; too many: {', '.join(map(str, ctx.args[:10]))}")
        return rest


class SegmentsType(click.ParamType[int]):
    """`last:N`, or `all`, which is None."""

    name = "segments"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "all":
            return None  # type: ignore[return-value]
        match = re.fullmatch(r"last:(\d{1,18})", str(value))
        if match is None:
            self.fail(f"{value!r} is not last:N or all", param, ctx)
        return int(match[1])


class NumbersType(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\d+(,\d+)*", str(value)):
            self.fail(f"{value!r} is not a list of numbers like 0,4,8", param, ctx)
        return tuple(map(int, str(value).split(",")))


def common(command: F) -> F:
    """`-v`, of every command."""
    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        help="Show all names in notes, and where an error came from.",
    )(command)


def as_json(command: F) -> F:
    """`--json`, of every command that prints data."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with notes and errors in it.")(
        command
    )


def effort(command: F) -> F:
    """`--workers` and `--memory`, of every command that moves tensors."""
    workers = click.option(
        "--workers", type=click.IntRange(1, 256), default=None, help="Threads.  [default: one per core, at most 8]"
    )
    memory = click.option(
        "--memory", type=SizeType(), default="256M", show_default=True, help="Tensor data held at once, by all threads."
    )
    return workers(memory(command))


def no_lock(command: F) -> F:
    """`--no-lock`, of every command that writes."""
    return click.option(
        "--no-lock", is_flag=True, help="Go on where the file system cannot lock files: nobody else may write TARGET."
    )(command)


def accept_suspicious(command: F) -> F:
    """`--accept-suspicious`, of every command that writes what it reads."""
    return click.option(
        "--accept-suspicious",
        is_flag=True,
        help="Write also what `ckpt verify` calls suspicious, such as shifted optimizer states.",
    )(command)


@dataclass(frozen=True)
class SourceOptions:
    """What the user says of the source: files, by the options that name them."""

    rules: str | None = None
    param_order: tuple[str, ...] = ()
    """Files, or `PLACE=FILE` for the optimizer at a place."""
    shapes: str | None = None


def reading(command: F) -> F:
    """The options of every command that reads a checkpoint, which it gets as one `SourceOptions`."""

    @wraps(command)
    def gathered(*args: Any, rules: str | None, param_order: tuple[str, ...], shapes: str | None, **others: Any) -> Any:
        return command(*args, reading=SourceOptions(rules, param_order, shapes), **others)

    file = click.Path(dir_okay=False, readable=False)
    for option in (
        click.option("--shapes", metavar="CHECKPOINT", help="Whose shapes to use, where files hold flat slices only."),
        click.option(
            "--param-order",
            multiple=True,
            metavar="[PLACE=]FILE",
            help="File that names the optimizer's parameters in order; of several optimizers, with its place.",
        ),
        click.option("--rules", type=file, help="TOML file that says how tensor-parallel tensors are cut."),
    ):
        gathered = option(gathered)
    return cast(F, gathered)


@dataclass(frozen=True)
class LayoutOptions:
    """How the user wants the target laid out. What is not said stays as the source has it."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    stages: tuple[int, ...] | None = None
    ep: int | None = None
    etp: int | None = None
    zero: int | None = None
    vocab_rows: int | None = None
    keys: str | None = None


def cut(command: F) -> F:
    """The options of every command that writes for another number of ranks, which it gets as one `LayoutOptions`."""

    @wraps(command)
    def gathered(*args: Any, **said: Any) -> Any:
        wanted = LayoutOptions(**{field.name: said.pop(field.name) for field in fields(LayoutOptions)})
        return command(*args, cut=wanted, **said)

    ranks = click.IntRange(1, MOST_RANKS)
    for option in reversed(
        (
            click.option("--dp", type=ranks, help="Data-parallel ranks."),
            click.option("--tp", type=ranks, help="Tensor-parallel ranks; the checkpoint's rules must say how."),
            click.option("--pp", type=ranks, help="Pipeline stages."),
            click.option("--vpp", type=ranks, help="Model chunks of each pipeline stage."),
            click.option(
                "--stages",
                type=NumbersType(),
                help="First layer of each pipeline stage, or model chunk, such as 0,4,8.",
            ),
            click.option("--ep", type=ranks, help="Expert-parallel ranks."),
            click.option("--etp", type=ranks, help="Tensor-parallel ranks of each expert."),
            click.option(
                "--zero",
                type=click.IntRange(0, 3),
                help="ZeRO stage; for Megatron, 1 is its distributed optimizer.",
            ),
            click.option(
                "--vocab-rows",
                type=click.IntRange(1),
                help="Rows of the vocabulary's tables with padding, if the model pads otherwise at the new TP.",
            ),
            click.option(
                "--keys",
                type=click.Choice(list(STYLES)),
                help="How `dcp` keys its state dicts.  [default: as the source has them, else nested]",
            ),
        )
    ):
        gathered = option(gathered)
    return cast(F, gathered)


def target_format(default: str | None, said: str) -> Callable[[F], F]:
    """`--to`. `said` is what happens without it, where there is no default."""
    return click.option(
        "--to",
        "format_name",
        type=click.Choice(list(FORMATS)),
        metavar="FORMAT",
        default=default,
        show_default=default is not None,
        help=f"Format of TARGET: {', '.join(name for name in FORMATS if name not in ONLY_READ)}.{said}",
    )
