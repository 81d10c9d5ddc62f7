"""The checkpoint that a command writes: its path, its format, and the options of formats.

Formats are dataclasses, and their fields are their options. They are listed here, with their types on the command
line, so that `--help` has to import no format; a test compares the list with the fields.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click

from ckpt_cli.options.groups import with_options
from ckpt_cli.options.types import CheckpointPath, NamedPath, NumbersType, SizeType, numbers
from ckpt_formats.core.arguments import Positive, Ranks, ZeroStage
from ckpt_formats.registry import FORMATS, ONLY_READ
from ckpt_formats.state_dicts.keys import STYLES
from ckpt_formats.stores.location import target_path

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckpt_formats.core.format import WritableFormat

F = TypeVar("F", bound=Callable[..., Any])


class FormatName(click.Choice[str]):
    """The name of a format of ckpt or of an installed package. Packages are looked at only for other names than ckpt's,
    since that takes time."""

    def __init__(self) -> None:
        super().__init__(list(FORMATS))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in FORMATS:
            return str(value)
        from ckpt_cli.options.suggestions import FORMATS as OTHER_NAMES  # only a name that ckpt does not have

        if (meant := OTHER_NAMES.get(str(value).lower(), str(value).lower())) in FORMATS:
            self.fail(f"{value!r:.60} is not the name of a format. Did you mean {meant!r}?", param, ctx)
        if value not in (provided := _provided()):
            written = ", ".join(name for name in (*FORMATS, *provided) if name not in ONLY_READ)
            self.fail(f"{value!r:.60} is not the name of a format that ckpt writes. There are: {written}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        return click.Choice([*FORMATS, *_provided()]).shell_complete(ctx, param, incomplete)


def _provided() -> Collection[str]:
    from ckpt_formats.registry.plugins import plugins

    return plugins()


class FormatOption(NamedTuple):
    """An option of one or more formats."""

    flag: str
    type: Any
    help: str
    formats: tuple[str, ...]


_RANKS = numbers(Ranks)
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
        numbers(ZeroStage),
        "ZeRO stage; for Megatron, 1 is its distributed optimizer.",
        (*_DEEPSPEED, *_MEGATRON),
    ),
    "vocab_rows": FormatOption(
        "--vocab-rows",
        numbers(Positive),
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
    "with_optimizer": FormatOption(
        "--with-optimizer", bool, "Also write optimizer states, into a single file.", ("safetensors",)
    ),
    "pack_nbytes": FormatOption(
        "--pack-size", SizeType(), "Bytes of values in a file of the universal format.  [default: 64M]", ("universal",)
    ),
    "chunk_nbytes": FormatOption("--chunk-size", SizeType(), "Maximum size of a chunk.  [default: 64M]", ("orbax",)),
    "file_nbytes": FormatOption(
        "--file-size", SizeType(), "Maximum size of a data file of several chunks.  [default: 256M]", ("orbax",)
    ),
    "parts_per_axis": FormatOption(
        "--parts-per-axis",
        numbers(Positive),
        "Cut each axis into N parts, if its length is a multiple of N: N devices read only their own.  [default: 1]",
        ("orbax",),
    ),
    "zarr3": FormatOption("--zarr3", bool, "Write arrays of zarr 3 instead of 2.", ("orbax",)),
    "config": FormatOption(
        "--config",
        NamedPath(readable=False),
        "config.json, or the folder with it and the tokenizer.  [default: that of the source]",
        ("hf", "gguf", *_MEGATRON),
    ),
    "separator": FormatOption(
        "--separator",
        click.Choice([".", "/", ""]),
        "Separator at which names are split into keys of nested dicts.  [default: that of the source, else .]",
        ("flax",),
    ),
    "outtype": FormatOption(
        "--outtype",
        click.Choice(["f32", "f16", "bf16", "q8_0"]),
        "Type of matrices; vectors, norms and routers are f32.  [default: that of the source]",
        ("gguf",),
    ),
    "without_tokenizer": FormatOption("--no-tokenizer", bool, "Leave out the tokenizer.", ("gguf",)),
}
"""The options by the name of the field. A field that is not here has no option on the command line."""


@dataclass(frozen=True)
class Target:
    """The path to write to, the format that the user named or None, and the options that the user gave."""

    path: Path
    format_name: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    seal: bool = False
    """Whether the user wants the target sealed."""
    protect: int | None = None
    """How many files of the target parity shall replace; None: none is written."""
    overwrite: bool = False
    """Whether a checkpoint at the path is replaced."""
    is_folder: bool = False
    """Whether the user wrote the path with a slash at its end: a folder, whatever its ending says."""

    def format(self, default: str, original: str | None = None) -> "WritableFormat":
        """The format with its options: the one that the user named, else that of the path's ending, else `default`.

        `original` is the format of the source: a note states if models of Hugging Face get another one by default.
        Raises `UnsupportedError`.
        """
        from ckpt_formats.registry import writable
        from ckpt_formats.registry.endings import format_of_ending

        name = self.format_name or (None if self.is_folder else format_of_ending(self.path)) or default
        self.note_ending(name)
        if original == "hf" and self.format_name is None and name == "universal" and self.path.suffix != ".ucp":
            self._note("the result is in the universal format; with --to hf, it is a folder that transformers loads")
        return self.with_options(writable(name))

    def note_ending(self, format_name: str) -> None:
        """Tell the user if the path has the ending of another format."""
        from ckpt_cli.reading import note
        from ckpt_formats.registry.endings import notices_of_ending

        note(*notices_of_ending(self.path, format_name))

    def _check_seal(self, format_name: str) -> None:
        from ckpt_formats.core.errors import InvalidArgumentError

        if self.seal and format_name == "universal":
            raise InvalidArgumentError(
                "a universal checkpoint has checksums of all its bytes", where=self.path, hint="Leave out --seal."
            )

    def _note(self, text: str) -> None:
        from ckpt_cli.reading import note
        from ckpt_formats.core.notices import Notice

        note(Notice(text))

    def with_options(self, format: "WritableFormat") -> "WritableFormat":
        """A format with the options that the user gave.

        Raises `InvalidArgumentError` for an option that it does not have.
        """
        from dataclasses import fields, replace

        from ckpt_cli.reading import source_place
        from ckpt_formats.core.errors import InvalidArgumentError

        self._check_seal(format.name)
        known = {field.name for field in fields(format)}
        if unknown := [option for option in self.options if option not in known]:
            flags = [option.flag for name, option in FORMAT_OPTIONS.items() if name in known]
            option = FORMAT_OPTIONS[unknown[0]]
            raise InvalidArgumentError(
                f"format {format.name} has no option {option.flag}",
                where=str(self.path),
                hint=f"Its options: {', '.join(flags) or 'none'}. {option.flag} is one of {', '.join(option.formats)}.",
            )
        rules = click.get_current_context().meta.get("ckpt.rules", ())
        own: dict[str, Any] = {"rules": rules} if rules and "rules" in known else {}
        if config := self.options.get("config"):
            own["config"] = source_place(config)
        return replace(format, **{**self.options, **own})


def _kind(option: FormatOption) -> dict[str, Any]:
    """What Click needs to know of an option's values; a flag that is not given is None, as other options are."""
    return {"is_flag": True, "default": None} if option.type is bool else {"type": option.type}


_ENDINGS = ".safetensors, .pt (.pth, .bin, .ckpt: torch), .ucp (universal), .msgpack (flax), .gguf"


protecting = click.option(
    "--protect",
    type=click.IntRange(1, 32),
    metavar="M",
    help="Then write parity that replaces any M files, or parts of a single one, as `ckpt protect` does.",
)
overwriting = click.option(
    "--overwrite", is_flag=True, help="Replace a checkpoint at TARGET. It goes when the new one is complete."
)


def _check_protected(target: str) -> None:
    """Raise `UsageError` if a target would be a single object in a store, which has no parity."""
    from ckpt_formats.registry.endings import ENDINGS
    from ckpt_formats.stores.location import is_url

    if is_url(target) and Path(target).suffix in ENDINGS:
        raise click.UsageError("--protect in a store is for folders: this target would be a single object.")


def target(default: str) -> Callable[[F], F]:
    """TARGET, `--to` and the options of formats; the command gets one `Target`.

    `default` says in `--help` which format a target without an ending gets.
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def wrapper(
            *args: Any,
            target: str,
            format_name: str | None,
            seal: bool,
            protect: int | None,
            overwrite: bool,
            **arguments: Any,
        ) -> Any:
            if protect is not None:
                _check_protected(target)
            options = {name: arguments.pop(name) for name in FORMAT_OPTIONS}
            given = {name: value for name, value in options.items() if value is not None}
            place = Target(target_path(target), format_name, given, seal, protect, overwrite, target.endswith("/"))
            return command(*args, target=place, **arguments)

        options = [
            click.option(option.flag, name, **_kind(option), help=f"{', '.join(option.formats)}: {option.help}")
            for name, option in FORMAT_OPTIONS.items()
        ]
        writable = ", ".join(name for name in FORMATS if name not in ONLY_READ)
        to = click.option(
            "--to",
            "format_name",
            type=FormatName(),
            metavar="FORMAT",
            help=f"Format of TARGET: {writable}.  [default: by TARGET's ending, {_ENDINGS}; else {default}]",
        )
        seal = click.option(
            "--seal", is_flag=True, help="Then write checksums of all files next to them, as `ckpt seal` does."
        )
        grouped = with_options(wrapper, to, *options, seal, protecting, overwriting, group="Target")
        return cast(F, click.argument("target", type=CheckpointPath())(grouped))

    return decorate
