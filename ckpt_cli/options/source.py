"""Checkpoints that a command reads: their arguments, the options of readers, and edits on the way."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.types import CheckpointPath, FloatType

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint
    from ckpt_formats.core.format import ReadOptions

F = TypeVar("F", bound=Callable[..., Any])

NAMINGS = ("hf", "megatron", "megatron-legacy")
"""Whose names tensors may have: Hugging Face's, Megatron core's, or those from before it."""

_READER = (
    click.option("--shapes", metavar="CHECKPOINT", help="Whose shapes to use, where files hold flat slices only."),
    click.option(
        "--param-order",
        multiple=True,
        metavar="[PLACE=]FILE",
        help="File that names the optimizer's parameters in order; of several optimizers, with its place.",
    ),
    click.option(
        "--rules",
        type=click.Path(dir_okay=False, readable=False),
        help="TOML file that says how tensor-parallel tensors are cut.",
    ),
)


def read_options(command: F) -> F:
    """`--rules`, `--param-order` and `--shapes`; the command gets them as one `ReadOptions`."""

    @wraps(command)
    def gathered(*args: Any, rules: str | None, param_order: tuple[str, ...], shapes: str | None, **others: Any) -> Any:
        from ckpt_cli.reading import parse_read_options

        options = parse_read_options(rules, param_order, shapes)
        click.get_current_context().meta["ckpt.rules"] = options.rules
        return command(*args, options=options, **others)

    return cast(F, _with(gathered, _READER))


def source(*names: str, accept_suspicious: bool = False, optional: str | None = None) -> Callable[[F], F]:
    """Arguments that are checkpoints; the command gets them opened, and their notices become notes.

    With `accept_suspicious`, suspicions can be accepted. The argument `optional` may be left out: it is None then.
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def opened(*args: Any, options: "ReadOptions", accept_suspicious: bool = False, **others: Any) -> Any:
            from ckpt_cli.reading import open_source

            for name in names:
                if others[name] is not None:
                    others[name] = open_source(others[name], options, accept_suspicious)
            return command(*args, **others)

        decorated: Any = read_options(opened)
        if accept_suspicious:
            decorated = _accept_suspicious(decorated)
        for name in reversed(names):
            decorated = click.argument(name, type=CheckpointPath(), required=name != optional)(decorated)
        return cast(F, decorated)

    return decorate


_accept_suspicious = click.option(
    "--accept-suspicious",
    is_flag=True,
    help="Write also what `ckpt verify` calls suspicious, such as shifted optimizer states.",
)

only = click.option("--only", multiple=True, metavar="PATTERN", help="Keep parameters whose names match.")
skip = click.option("--skip", multiple=True, metavar="PATTERN", help="Leave out parameters whose names match.")

_EDITS = (
    click.option(
        "--names",
        type=click.Choice(NAMINGS),
        help="Whose names tensors get.  [default: those that the format needs, else the source's]",
    ),
    click.option(
        "--dtype",
        type=FloatType(),
        metavar="TYPE",
        help="Round the model's weights to fp32, bf16, fp16, ... (states stay).",
    ),
    click.option("--model-only", is_flag=True, help="The model's tensors, without optimizer and extras."),
    skip,
    only,
)


def edits(command: F) -> F:
    """`--only`, `--skip`, `--model-only`, `--dtype` and `--names`; the command gets the edited source."""

    @wraps(command)
    def edited(
        *args: Any,
        source: "Checkpoint",
        only: tuple[str, ...],
        skip: tuple[str, ...],
        model_only: bool,
        dtype: str | None,
        names: Any,
        **others: Any,
    ) -> Any:
        from pathlib import Path

        from ckpt.rename import use_names

        if only or skip:
            source = source.select(only, skip)
        if model_only:
            source = source.weights_only()
        if names:
            config = click.get_current_context().params.get("config")
            source = use_names(source, names, Path(config) if config else None)
        if dtype:
            source = source.cast(dtype)
        return command(*args, source=source, **others)

    return cast(F, _with(edited, _EDITS))


def _with(command: Any, options: Any) -> Any:
    for option in options:
        command = option(command)
    return command
