"""The options of `publish`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import click

from ckpt_cli.options.command import dry_run
from ckpt_cli.options.groups import with_options
from ckpt_cli.options.types import FileToRead, FloatType, NamedPath, numbers
from ckpt_formats.core.arguments import Count

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PublishOptions:
    """What is published, and how."""

    step: int | None
    names: Literal["hf", "as-is"]
    dtype: str | None
    config: Path | None
    before: str | None
    keep: str | None
    key: Path | None
    every: float | None
    """Seconds between two looks into the folder of a run; None: one checkpoint is published."""
    dry_run: bool


_OPTIONS = (
    click.option("--step", type=numbers(Count), help="The step, if the checkpoint states none or another one."),
    click.option(
        "--keep",
        metavar="last:N",
        help="How many steps stay. What they do not need is removed after ten minutes.  [default: all]",
    ),
    click.option(
        "--before",
        metavar="CKPT",
        help="Read the values of the last step from here, such as from the checkpoint that was published last. ckpt "
        "compares them with the chain.  [default: the chain]",
    ),
    click.option(
        "--key", type=FileToRead(Path), metavar="FILE", help="Sign what is published with the key in this file."
    ),
    dry_run,
)
_TENSORS = (
    click.option(
        "--names",
        type=click.Choice(["hf", "as-is"]),
        default="hf",
        show_default=True,
        help="Names of tensors: those of Hugging Face's libraries, or those of the checkpoint.",
    ),
    click.option("--dtype", type=FloatType(), metavar="TYPE", help="Round weights to bf16, fp16, fp32, ..."),
    click.option(
        "--config",
        type=NamedPath(readable=False),
        help="config.json, or the folder with it and the tokenizer.  [default: that of the checkpoint]",
    ),
)
_WATCH = (
    click.option(
        "--watch",
        is_flag=True,
        help="CKPT is the folder of a run: publish each checkpoint that becomes complete there, until Ctrl-C.",
    ),
    click.option(
        "--every",
        type=click.FloatRange(min=0.1),
        default=5.0,
        show_default=True,
        help="Seconds between two checks. A checkpoint whose files do not change for so long is complete.",
    ),
)


def publish_options(function: F) -> F:
    """All options but those of readers and resources; the command gets them as one `PublishOptions`."""

    @wraps(function)
    def wrapper(*args: Any, watch: bool, every: float, **arguments: Any) -> Any:
        from ckpt_cli.reading import source_place

        own = {name: arguments.pop(name) for name in PublishOptions.__dataclass_fields__ if name != "every"}
        if watch and (own["step"] is not None or own["before"] is not None or own["dry_run"]):
            raise click.UsageError("--watch takes none of --step, --before and --dry-run")
        if own["config"] is not None:
            own["config"] = source_place(own["config"])
        return function(*args, given=PublishOptions(**own, every=every if watch else None), **arguments)

    decorated = with_options(wrapper, *_OPTIONS)
    decorated = with_options(decorated, *_WATCH, group="A run")
    return cast(F, with_options(decorated, *_TENSORS, group="Tensors"))
