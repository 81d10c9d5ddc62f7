"""Checkpoints that a command reads: their arguments, the options of readers, and edits on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ckpt_cli.options.groups import take_options, with_options
from ckpt_cli.options.types import CheckpointPath, FileToRead, FloatType, PatternType, RenameType

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_cli.options.target import Target
    from ckpt_formats.core.checkpoint import Checkpoint
    from ckpt_formats.core.format import ReadOptions
    from ckpt_formats.core.notices import Notice

F = TypeVar("F", bound=Callable[..., Any])

NAMINGS = ("hf", "megatron", "megatron-legacy", "torchtitan", "meta", "maxtext")
"""The names that tensors can have: those of Hugging Face, of Megatron core, or of older Megatron."""


QUANTISED = ("fp8-block", "mxfp4", "q8_0")
"""The schemes of quantised weights that ckpt writes."""
_OF_GGUF = "q8_0"
_CHAIN = "chain.json"


def _note_anonymous(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta["ckpt.anonymous"] = value


anonymous = click.option(
    "--anonymous",
    is_flag=True,
    expose_value=False,
    callback=_note_anonymous,
    help="Read from stores without credentials: public buckets and repositories.",
)
"""Noted in the context, where `ckpt_cli.reading.source_place` finds it."""

_RULES = click.option(
    "--rules",
    type=FileToRead(),
    help="TOML file with the rules by which tensor-parallel tensors are sharded.",
)
_READER = (
    _RULES,
    click.option(
        "--param-order",
        multiple=True,
        metavar="[PLACE=]FILE",
        help="File that lists the optimizer's parameters in order; for several optimizers, each with its place.",
    ),
    click.option(
        "--shapes",
        metavar="CKPT",
        help="Another checkpoint of the model, whose shapes are used if files have flat slices only.",
    ),
    anonymous,
)


def read_options(command: F) -> F:
    """`--rules`, `--param-order` and `--shapes`; the command gets them as one `ReadOptions`."""

    @wraps(command)
    def wrapper(
        *args: Any, rules: str | None, param_order: tuple[str, ...], shapes: str | None, **arguments: Any
    ) -> Any:
        from ckpt_cli.reading import parse_read_options

        options = parse_read_options(rules, param_order, shapes)
        meta = click.get_current_context().meta
        meta["ckpt.rules"], meta["ckpt.read"] = options.rules, options
        return command(*args, options=options, **arguments)

    return cast(F, with_options(wrapper, *_READER, group="Reading"))


def rules_option(command: F) -> F:
    """`--rules` alone; the command gets the rules."""

    @wraps(command)
    def wrapper(*args: Any, rules: str | None, **arguments: Any) -> Any:
        from ckpt_cli.reading import parse_read_options

        return command(*args, rules=parse_read_options(rules, (), None).rules, **arguments)

    return cast(F, with_options(wrapper, _RULES))


def place_of(path: str) -> "Path":
    """The path of what a command reads, in the file system or in a store."""
    from ckpt_cli.reading import source_place

    return source_place(path)


def is_anonymous() -> bool:
    """Whether requests to stores have no credentials, by `--anonymous`."""
    from ckpt_cli import reading

    return reading.is_anonymous()


def places_of(paths: Sequence[str], every: bool) -> "list[Path]":
    """The places of what a command reads; with `every`, all checkpoints in folders of runs."""
    if not every:
        return list(map(place_of, paths))
    return [place for path in paths for place in with_checkpoints_inside(path)[1] or [place_of(path)]]


def with_checkpoints_inside(path: str) -> "tuple[str | Path, list[Path]]":
    """The place that a path names, and the checkpoints in it if it is the folder of several."""
    from ckpt_cli import reading

    return reading.with_checkpoints_inside(path)


def is_family(place: "Path | str") -> bool:
    """Whether a path is that of a family of models, of which a command reads one that the path names."""
    if isinstance(place, str) or not place.is_dir():
        return False
    if not (place / _CHAIN).is_file():
        return False
    from ckpt_formats.universal.chain import chain_file  # not for a checkpoint, which every command may read

    return chain_file.load(place / chain_file.NAME).is_family


def models_of(place: "Path | str") -> "list[Path]":
    """The paths of all models, if a path is that of a family of models; else none."""
    if isinstance(place, str) or not is_family(place):
        return []
    from ckpt_formats.universal.chain import chain_file

    members = chain_file.load(place / chain_file.NAME).members
    return [place.with_name(f"{place.name}@{member.name}") for member in members]


def opening(path: "Path | str", options: "ReadOptions") -> "Callable[[], Checkpoint]":
    """What opens the checkpoint at a path, for a command that itself reports why it cannot be opened."""
    from ckpt_cli.reading import open_source

    return lambda: open_source(path, options)


only = click.option(
    "--only", type=PatternType(), multiple=True, metavar="PATTERN", help="Only parameters whose names match."
)
skip = click.option(
    "--skip", type=PatternType(), multiple=True, metavar="PATTERN", help="Leave out parameters whose names match."
)


@dataclass(frozen=True)
class Choice:
    """The parameters that `--only` and `--skip` choose."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything may be left out."""
        return bool(self.only or self.skip)

    def of(self, checkpoint: "Checkpoint") -> "Checkpoint":
        """The chosen part; a note names what is left out. Raises `NoMatchError`."""
        if not self:
            return checkpoint
        from ckpt_cli import reading

        part = checkpoint.select(self.only, self.skip)
        reading.note(left_out(checkpoint, part))
        return part


def left_out(checkpoint: "Checkpoint", part: "Checkpoint") -> "Notice":
    """The notice that names the parameters that `--only` and `--skip` leave out."""
    from ckpt_formats.core.notices import Notice

    names = tuple(name for name in checkpoint.parameters if name not in part.parameters)
    every = len(checkpoint.parameters)
    return Notice(f"--only and --skip leave out {len(names):,} of {every:,} parameters", names)


def choosing(command: F) -> F:
    """`--only` and `--skip`; the command gets them as one `Choice`."""

    @wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> Any:
        return command(*args, choice=take_options(Choice, arguments), **arguments)

    return cast(F, with_options(wrapper, only, skip))


@dataclass(frozen=True)
class Listed:
    """A checkpoint of several that are listed."""

    name: str
    """Its name in the folder of its run, or the path that was given."""
    place: "str | Path"
    """A text if it is the address of a shadow, or a path that cannot be listed."""
    open: "Callable[[], Checkpoint]"
    """Opens it, or raises `CkptError`."""


def listed(paths: Sequence[str], options: "ReadOptions", choice: Choice) -> list[Listed]:
    """The checkpoints at some paths, and all of those that are folders of runs. None is opened, and none is missing."""
    from ckpt_cli.reading import note, open_quietly
    from ckpt_formats.core.errors import CkptError
    from ckpt_formats.core.notices import Notice

    def opened(place: "str | Path") -> "Checkpoint":
        checkpoint = open_quietly(place, options)
        return checkpoint.select(choice.only, choice.skip) if choice else checkpoint

    every: list[Listed] = []
    for path in paths:
        try:
            place, inside = with_checkpoints_inside(path)
        except CkptError:
            place, inside = path, []  # opening it says why
        every += [Listed(f"{path.rstrip('/')}/{one.name}", one, partial(opened, one)) for one in inside]
        models = models_of(place)
        every += [Listed(str(one), one, partial(opened, one)) for one in models]
        if not (inside or models):
            every.append(Listed(path, place, partial(opened, place)))
    if choice:
        note(Notice("of each checkpoint, only the parameters that --only and --skip choose are counted"))
    return every


CKPT = "CKPT"
"""How help texts call a checkpoint that a command reads."""
_PLAIN_NAMES = ("source", "path", "checkpoint")
"""Of arguments that are called so. Others are called by what they are for: MODEL, ADAPTER."""


def source(
    *names: str,
    accept_suspicious: bool = False,
    several: str | None = None,
    states: bool = True,
    option: str | None = None,
    runs: bool = False,
    goes_on: bool = False,
) -> Callable[[F], F]:
    """Arguments that are checkpoints; the command gets them opened, and their notices become notes.

    With `accept_suspicious`, suspicions can be accepted. `several` is the metavar of an argument that may be given
    again: the command gets a tuple, and with `states`, a chain alone stands for all its stored states, with `runs` the
    folder of a run for its checkpoints. `option`: an option of the command whose path, if given, is opened likewise.
    `goes_on`: of more than two checkpoints, those after the first that cannot be opened are left out; the command gets
    their errors by path as `unread`.
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def opened(*args: Any, options: "ReadOptions", accept_suspicious: bool = False, **arguments: Any) -> Any:
            from ckpt_cli.reading import expand_chain, open_quietly, open_readable, open_source

            for name in names:
                paths = arguments[name]
                if isinstance(paths, tuple):
                    if states and len(paths) == 1:
                        paths = expand_chain(paths[0], arguments.get("last"), runs)
                    if goes_on:
                        arguments[name], arguments["unread"] = open_readable(paths, options)
                    else:
                        arguments[name] = tuple(open_source(path, options, accept_suspicious) for path in paths)
                else:
                    arguments[name] = open_source(paths, options, accept_suspicious)
            if option is not None and arguments[option] is not None:
                arguments[option] = open_quietly(arguments[option], options)
            return command(*args, **arguments)

        decorated: Any = read_options(opened)
        if accept_suspicious:
            decorated = with_options(decorated, _accept_suspicious, group="Reading")
        more: dict[str, Any] = {} if several is None else {"nargs": -1, "required": True, "metavar": several}
        for name in reversed(names):
            named = {"metavar": CKPT} if name in _PLAIN_NAMES else {}
            decorated = click.argument(name, type=CheckpointPath(), **{**named, **more})(decorated)
        return cast(F, decorated)

    return decorate


_accept_suspicious = click.option(
    "--accept-suspicious",
    is_flag=True,
    help="Also write checkpoints that `ckpt verify` calls suspicious, such as those with shifted optimizer states.",
)

model_only = click.option("--model-only", is_flag=True, help="Only the model's tensors, without optimizer and extras.")


def parts(command: F) -> F:
    """`--only`, `--skip` and `--model-only`; the command gets the chosen part of the source."""

    @wraps(command)
    def chosen(
        *args: Any,
        source: "Checkpoint",
        only: tuple[str, ...],
        skip: tuple[str, ...],
        model_only: bool,
        **arguments: Any,
    ) -> Any:
        if only or skip:
            source = source.select(only, skip)
        if model_only:
            source = source.weights_only()
        return command(*args, source=source, **arguments)

    return cast(F, with_options(chosen, only, skip, model_only, group="Edits"))


allow_rounding = click.option(
    "--allow-rounding",
    is_flag=True,
    help="With --names: round weights that MaxText stores scaled or with one added, such as queries and norms, and "
    "their moments.",
)

_EDITS = (
    only,
    skip,
    model_only,
    click.option(
        "--drop-optimizer",
        is_flag=True,
        help="Leave out the optimizer's states, its schedule and its loss scaler; step and arguments stay.",
    ),
    click.option(
        "--dtype",
        type=FloatType(),
        metavar="TYPE",
        help="Round the model's weights to fp32, bf16, fp16, ...; states are not rounded.",
    ),
    click.option(
        "--allow-overflow",
        is_flag=True,
        help="With --dtype and a type of 8 bits: write values that are too large for it as infinite or NaN.",
    ),
    click.option(
        "--quantise",
        type=click.Choice(QUANTISED),
        help="Write the matrices of linear layers as codes and scales; embeddings, head and routers stay plain.",
    ),
    click.option(
        "--leave-plain",
        type=PatternType(),
        multiple=True,
        metavar="PATTERN",
        help="With --quantise: leave weights plain whose names match. May be given again.",
    ),
    click.option(
        "--names",
        type=click.Choice(NAMINGS),
        help="Names of tensors in TARGET.  [default: those that the format needs, else the source's]",
    ),
    allow_rounding,
)


_RENAMES = (
    click.option(
        "--rename",
        type=RenameType(),
        multiple=True,
        metavar="PATTERN=NEW",
        help=r"Replace what matches in each name by NEW, with \1 for the first group. May be given again.",
    ),
    click.option(
        "--strip-prefix", default="", metavar="TEXT", help="Remove TEXT from where names begin with it, before --names."
    ),
    click.option("--add-prefix", default="", metavar="TEXT", help="Put TEXT before all names."),
)


def renames(command: F) -> F:
    """`--rename`, `--strip-prefix` and `--add-prefix`; the command gets the renamed source."""

    @wraps(command)
    def renamed(
        *args: Any,
        source: "Checkpoint",
        rename: tuple[tuple[str, str], ...],
        strip_prefix: str,
        add_prefix: str,
        **arguments: Any,
    ) -> Any:
        if rename or strip_prefix or add_prefix:
            from ckpt.rename import rename_by

            source = rename_by(source, rename, strip_prefix, add_prefix)
        return command(*args, source=source, **arguments)

    return cast(F, with_options(renamed, *_RENAMES, group="Edits"))


def _in_blocks_of_gguf(target: "Target", scheme: str, leave_plain: tuple[str, ...]) -> "Target":
    """The target with matrices in blocks of GGUF. Raises `InvalidArgumentError` for any other format."""
    from ckpt_formats.core.errors import InvalidArgumentError
    from ckpt_formats.registry.endings import format_of_ending

    named = target.format_name or (None if target.is_folder else format_of_ending(target.path))
    if named != "gguf":
        raise InvalidArgumentError(
            f"--quantise {scheme} is a type of GGUF files, not of {named or 'this target'}",
            where=str(target.path),
            hint="Write a file that ends in .gguf, or choose fp8-block or mxfp4.",
        )
    if leave_plain:
        raise InvalidArgumentError(
            f"--leave-plain does not go with --quantise {scheme}: llama.cpp fixes which tensors stay plain",
            hint="Leave out --leave-plain.",
        )
    if (other := target.options.get("outtype", scheme)) != scheme:
        raise InvalidArgumentError(f"--quantise {scheme} and --outtype {other} exclude each other")
    return replace(target, options={**target.options, "outtype": scheme})


def edits(command: F) -> F:
    """`--only`, `--skip`, `--model-only`, `--drop-optimizer`, `--dtype`, `--quantise` and `--names`, for the source."""

    @wraps(command)
    def edited(
        *args: Any,
        source: "Checkpoint",
        only: tuple[str, ...],
        skip: tuple[str, ...],
        model_only: bool,
        drop_optimizer: bool,
        dtype: str | None,
        allow_overflow: bool,
        quantise: str | None,
        leave_plain: tuple[str, ...],
        names: Any,
        allow_rounding: bool,
        **arguments: Any,
    ) -> Any:
        from ckpt.rename import rename_by, use_names
        from ckpt_cli.reading import noted, source_place

        if only or skip:
            source = source.select(only, skip)
        if model_only:
            source = source.weights_only()
        if names:
            config = click.get_current_context().params.get("config")
            if prefix := arguments.get("strip_prefix"):  # of one of several models: its own names are behind it
                source, arguments["strip_prefix"] = rename_by(source, strip_prefix=prefix), ""
            source = use_names(source, names, source_place(config) if config else None, allow_rounding=allow_rounding)
        elif allow_rounding:
            raise click.UsageError("--allow-rounding is about the weights that --names scales: give --names, too.")
        if allow_overflow and not dtype:
            raise click.UsageError("--allow-overflow is about the values that --dtype rounds: give --dtype, too.")
        if dtype:
            source = noted(source.cast(dtype, allow_overflow))
        if drop_optimizer:
            source = source.without_optimizer()
        if leave_plain and not quantise:
            raise click.UsageError("--leave-plain is about the weights that --quantise changes: give --quantise, too.")
        if quantise == _OF_GGUF:
            arguments["target"] = _in_blocks_of_gguf(arguments["target"], quantise, leave_plain)
        elif quantise:
            source = noted(source.quantise(quantise, leave_plain))
        return command(*args, source=source, **arguments)

    return cast(F, with_options(edited, *_EDITS, group="Edits"))
