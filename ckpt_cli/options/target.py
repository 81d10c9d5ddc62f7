"""The checkpoint that a command writes: its path, its format, and the options of formats.

Formats are dataclasses, and their fields are their options. They are listed here, with their types on the command
line, so that `--help` has to import no format; a test compares the list with the fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.types import CheckpointPath, NumbersType, SizeType
from ckpt_formats.registry import FORMATS, ONLY_READ
from ckpt_formats.state_dicts.keys import STYLES
from ckpt_formats.stores.location import target_path

if TYPE_CHECKING:
    from ckpt_formats.core.format import WritableFormat

F = TypeVar("F", bound=Callable[..., Any])

MAX_RANKS = 1 << 16
"""Maximum of ranks along one dimension: more than any run has, and few enough to plan files for each."""


class FormatOption(NamedTuple):
    """An option of one or more formats."""

    flag: str
    type: Any
    help: str
    formats: tuple[str, ...]


_RANKS = click.IntRange(1, MAX_RANKS)
_MEGATRON = ("megatron", "megatron-legacy")
_DEEPSPEED = ("deepspeed", "deepspeed-universal")

FORMAT_OPTIONS: dict[str, FormatOption] = {
    "dp": FormatOption("--dp", _RANKS, "Data-parallel ranks.", (*_DEEPSPEED, *_MEGATRON, "dcp")),
    "tp": FormatOption(
        "--tp", _RANKS, "Tensor-parallel ranks; the checkpoint needs rules for them.", (*_DEEPSPEED, *_MEGATRON, "dcp")
    ),
    "pp": FormatOption("--pp", _RANKS, "Pipeline stages.", ("deepspeed", *_MEGATRON)),
    "vpp": FormatOption("--vpp", _RANKS, "Model chunks of each pipeline stage.", _MEGATRON),
    "stages": FormatOption(
        "--stages",
        NumbersType(),
        "First layer of each pipeline stage, or model chunk, such as 0,4,8.",
        ("deepspeed", *_MEGATRON),
    ),
    "ep": FormatOption("--ep", _RANKS, "Expert-parallel ranks.", _MEGATRON),
    "etp": FormatOption("--etp", _RANKS, "Tensor-parallel ranks of each expert.", _MEGATRON),
    "zero": FormatOption(
        "--zero",
        click.IntRange(0, 3),
        "ZeRO stage; for Megatron, 1 is its distributed optimizer.",
        (*_DEEPSPEED, *_MEGATRON),
    ),
    "vocab_rows": FormatOption(
        "--vocab-rows",
        click.IntRange(1),
        "Padded rows of vocabulary tables, if the model pads differently at the new TP.",
        (*_DEEPSPEED, *_MEGATRON),
    ),
    "keys": FormatOption(
        "--keys",
        click.Choice(list(STYLES)),
        "Keys of state dicts.  [default: those of the source, else nested]",
        ("dcp",),
    ),
    "shard_nbytes": FormatOption(
        "--shard-size", SizeType(), "Maximum size of a file of weights.  [default: 5G]", ("hf", "safetensors")
    ),
    "pack_nbytes": FormatOption(
        "--pack-size", SizeType(), "Bytes of values in a file of the universal format.  [default: 64M]", ("universal",)
    ),
    "config": FormatOption(
        "--config",
        click.Path(readable=False, path_type=Path),
        "config.json, or the folder with it and the tokenizer.  [default: that of the source]",
        ("hf", *_MEGATRON),
    ),
    "separator": FormatOption(
        "--separator",
        click.Choice([".", "/", ""]),
        "Separator at which names are split into keys of nested dicts.  [default: that of the source, else .]",
        ("flax",),
    ),
}
"""The options by the name of the field. A field that is not here has no option on the command line."""


@dataclass(frozen=True)
class Target:
    """The path to write to, the format that the user named or None, and the options that the user gave."""

    path: Path
    format_name: str | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def format(self, default: str) -> "WritableFormat":
        """The format with its options; `default` is taken if the user named none. Raises `Unsupported`."""
        from ckpt_formats.registry import writable

        return self.with_options(writable(self.format_name or default))

    def with_options(self, format: "WritableFormat") -> "WritableFormat":
        """A format with the options that the user gave. Raises `Unsupported` for an option that it does not have."""
        from dataclasses import fields, replace

        from ckpt_formats.core.errors import Unsupported

        known = {field.name for field in fields(format)}
        if unknown := [option for option in self.options if option not in known]:
            flags = [option.flag for name, option in FORMAT_OPTIONS.items() if name in known]
            raise Unsupported(
                f"format {format.name} has no option {FORMAT_OPTIONS[unknown[0]].flag}",
                hint=f"Its options: {', '.join(flags) or 'none'}.",
            )
        rules = click.get_current_context().meta.get("ckpt.rules", ())
        own = {"rules": rules} if rules and "rules" in known else {}
        return replace(format, **own, **self.options)


def target(default: str | None = None, without: str = "") -> Callable[[F], F]:
    """TARGET, `--to` and the options of formats; the command gets one `Target`.

    `without` is the help text for the case without `--to`, if there is no default.
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def wrapper(*args: Any, target: str, format_name: str | None, **arguments: Any) -> Any:
            options = {name: arguments.pop(name) for name in FORMAT_OPTIONS}
            given = {name: value for name, value in options.items() if value is not None}
            return command(*args, target=Target(target_path(target), format_name, given), **arguments)

        options = [
            click.option(option.flag, name, type=option.type, help=f"{', '.join(option.formats)}: {option.help}")
            for name, option in FORMAT_OPTIONS.items()
        ]
        writable = ", ".join(name for name in FORMATS if name not in ONLY_READ)
        to = click.option(
            "--to",
            "format_name",
            type=click.Choice(list(FORMATS)),
            metavar="FORMAT",
            default=default,
            show_default=default is not None,
            help=f"Format of TARGET: {writable}.{without}",
        )
        grouped = with_options(wrapper, to, *options, group="Target")
        return cast(F, click.argument("target", type=CheckpointPath())(grouped))

    return decorate
