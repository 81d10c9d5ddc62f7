"""Formats by name. To add one: write its module, and add its line to `FORMATS`.

The values are import paths, not classes, so that the list of names imports nothing.
The order is the order of detection: specific formats first.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpt_formats.core.errors import CkptError, NotFound, Unsupported
from ckpt_formats.core.gc_pause import gc_paused
from ckpt_formats.core.text import PARTIAL, printable

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint
    from ckpt_formats.core.format import Format, ReadOptions, WritableFormat
    from ckpt_formats.core.notices import Notice

FORMATS: dict[str, str] = {
    "universal": "ckpt_formats.universal:Universal",
    "chain": "ckpt_formats.universal.chain.format:ChainFormat",
    "deepspeed-universal": "ckpt_formats.engines.deepspeed.universal:DeepSpeedUniversal",
    "megatron": "ckpt_formats.engines.megatron:MegatronDist",
    "megatron-legacy": "ckpt_formats.engines.megatron:MegatronLegacy",
    "deepspeed": "ckpt_formats.engines.deepspeed:DeepSpeed",
    "torchtune": "ckpt_formats.engines.torchtune:Torchtune",
    "hf": "ckpt_formats.engines.hf:HuggingFace",
    "fsdp-ranks": "ckpt_formats.engines.fsdp_ranks:FsdpRanks",
    "dcp": "ckpt_formats.engines.dcp:DCP",
    "safetensors": "ckpt_formats.engines.safetensors:Safetensors",
    "flax": "ckpt_formats.engines.flax:Flax",
    "torch": "ckpt_formats.engines.torch_save:Torch",
    "torch-folder": "ckpt_formats.engines.torch_folder:TorchFolder",
}
ONLY_READ = ("chain", "fsdp-ranks", "torchtune", "torch-folder")
"""Formats that cannot be written. `writable` knows them too, but imports the format to find out."""
_OF_ENGINES = ("deepspeed", "deepspeed-universal", "megatron", "megatron-legacy", "dcp", "fsdp-ranks")
"""Formats of engines: trainers of Hugging Face's save files of their own next to them."""
_MAX_FOLDERS = 16
"""How many folders of a checkpoint are searched for traces of another engine."""
_OURS = ("universal", "chain")
"""Formats of ours: their files state the original format."""


def format_named(name: str) -> "Format":
    """The format of this name."""
    module, _, attribute = FORMATS[name].partition(":")
    format: Format = getattr(import_module(module), attribute)()
    return format


def writable(name: str, **options: object) -> "WritableFormat":
    """The format of this name, for writing. Raises `Unsupported` if it can only be read, or lacks an option."""
    from dataclasses import fields, replace

    from ckpt_formats.core.format import WritableFormat

    format = format_named(name)
    if not isinstance(format, WritableFormat):
        raise Unsupported(f"{name} can be read, not written", hint="Convert to `universal`, which holds everything.")
    known = [field.name for field in fields(format)]
    listed = ", ".join(known) or "none"
    if unknown := [option for option in options if option not in known]:
        raise Unsupported(f"format {name} has no option {unknown[0]}", hint=f"Its options: {listed}.")
    return replace(format, **options)


def detect(path: Path) -> "Format":
    """The format of the checkpoint at this path, or in it. Raises `NotFound`, `Incomplete` or `Unsupported`."""
    return _located(path).format


@gc_paused()
def open_checkpoint(path: Path, options: "ReadOptions | None" = None) -> "Checkpoint":
    """The index of the checkpoint at a path, of any format. Reads headers only.

    Its notices name files in its folder that are not read. Raises subclasses of `CkptError`.
    """
    from dataclasses import replace

    from ckpt_formats.containers.torchfile import check_repeated
    from ckpt_formats.core.checkpoint import Opened, OriginalForm
    from ckpt_formats.core.format import ReadOptions, identified
    from ckpt_formats.core.missing_states import check_states
    from ckpt_formats.detection.shard_alone import check_alone, check_whole_of_meta, parts_unread
    from ckpt_formats.detection.unread_files import unread

    if is_file := path.is_file():
        check_alone(path)
    located = _located(path)
    format = located.format
    checkpoint = identified(lambda: _read(located, options or ReadOptions()))
    _check_folders(checkpoint, located)
    check_whole_of_meta(checkpoint)
    written = [
        checkpoint.extras,
        [group.options for group in checkpoint.groups],
        [p.values for p in checkpoint.parameters.values()],
    ]
    check_repeated(written, printable(str(path)))  # here, so that every command gives the same answer
    notices = (*located.notices, *checkpoint.notices)
    if format.name not in _OURS:
        notices = (
            *notices,
            *check_states(checkpoint.parameters, checkpoint.groups, located.path, even=format.even_states),
        )
    if is_file:
        notices = (*notices, *parts_unread(path))
    elif format.name not in _OURS:
        named = {name for notice in notices for name in notice.names}
        notices = (*notices, *unread(path, (shard.path for shard in checkpoint.files), named))
    used = options or ReadOptions()
    shapes = None if used.shapes is None else used.shapes.history
    opened = Opened(path, (used.rules, used.order, used.orders, shapes))
    identities = {} if used.shapes is None else used.shapes.identities
    checkpoint = replace(
        checkpoint, notices=notices, history=(opened,), identities={**identities, **checkpoint.identities}
    )
    if format.name in _OURS or (checkpoint.original is not None and checkpoint.original.format == format.name):
        return checkpoint
    return replace(checkpoint, original=OriginalForm(format.name, path.name if is_file else None))


def _read(located: "_Located", options: "ReadOptions") -> "Checkpoint":
    """The checkpoint, with the files that a trainer saved next to it."""
    from ckpt_formats.engines.hf.trainer_files import with_run_around

    checkpoint = located.format.read(located.path, options)
    of_engine = located.format.name in _OF_ENGINES and located.path.is_dir()
    return with_run_around(checkpoint, located.path) if of_engine else checkpoint


class _Located(NamedTuple):
    """A checkpoint, its format, and notices about how it was chosen."""

    path: Path
    format: "Format"
    notices: "tuple[Notice, ...]" = ()


def _located(path: Path) -> _Located:
    """The checkpoint to which a path leads. Raises `NotFound`, `Incomplete` or `Unsupported` if there is none."""
    from ckpt_formats.detection.parents import find_inside

    if (state := _state_of_chain(path)) is not None:
        return state
    _check_there(path)
    if path.is_file():
        return _Located(path, _of_file(path))
    format = _of_folder(path)
    if format is not None:
        return _Located(path, format)
    inside = find_inside(path, _is_checkpoint)
    if inside is not None:
        chosen, notice = inside
        further = _located(chosen)
        return _Located(further.path, further.format, (notice, *further.notices))
    raise _unknown(path)


def _state_of_chain(path: Path) -> _Located | None:
    """The state of a chain that a path such as `run.chain@1234` names; None for other paths."""
    if "@" not in path.name:
        return None
    from ckpt_formats.universal.chain.address import parse
    from ckpt_formats.universal.chain.format import ChainFormat

    address = parse(path)
    return None if address is None else _Located(address.run, ChainFormat(address))


def _check_folders(checkpoint: "Checkpoint", located: _Located) -> None:
    """Raise `Incomplete` if files were read from a folder with traces of another engine."""
    from ckpt_formats.detection.traces import check_traces, names_in

    folders = dict.fromkeys(shard.path.parent for shard in checkpoint.files)
    for folder in [folder for folder in folders if folder != located.path][:_MAX_FOLDERS]:
        if folder.is_relative_to(located.path):
            check_traces(folder, set(names_in(folder)), located.format.name)


def _of_file(path: Path) -> "Format":
    from ckpt_formats.detection.foreign import check_file

    check_file(path)
    format = _first(path)
    if format is None:
        raise _not_known(path, "")
    return format


def _of_folder(path: Path) -> "Format | None":
    """The format of a folder; None if it has none. Raises `Incomplete` if it is the rest of another checkpoint."""
    from ckpt_formats.detection.traces import check_around, check_traces, names_in

    format, names = _first(path), set(names_in(path))
    check_traces(path, names, None if format is None else format.name)
    if format is not None:
        check_around(path, names, format.name)
    return format


def _first(path: Path) -> "Format | None":
    return next((format for format in map(format_named, FORMATS) if format.detect(path)), None)


def _is_checkpoint(path: Path) -> bool:
    """Whether this folder is a checkpoint, complete or not."""
    try:
        return not path.name.endswith(PARTIAL) and _of_folder(path) is not None
    except CkptError:
        return True


def _check_there(path: Path) -> None:
    try:
        path.stat()
    except FileNotFoundError:
        raise NotFound("there is nothing at this path", where=printable(str(path))) from None
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}", where=printable(str(path))) from error
    if any(part.endswith(PARTIAL) for part in path.absolute().parts):
        raise NotFound(
            "not a checkpoint, but the unfinished output of an interrupted run",
            where=printable(str(path)),
            hint="Run the same command again to continue, or remove the folder.",
        )


def _unknown(path: Path) -> CkptError:
    """The error for a folder that no format recognises, which depends on its files."""
    from ckpt_formats.detection.foreign import check_folder
    from ckpt_formats.detection.traces import check_run, names_in

    names = names_in(path)
    try:
        check_run(path, names)
        check_folder(path, names)
    except CkptError as error:
        return error
    return _not_known(path, _listing(path))


def _not_known(path: Path, listing: str) -> NotFound:
    return NotFound(
        f"not a checkpoint of a known format ({', '.join(FORMATS)}){listing}",
        where=printable(str(path)),
        hint="Name the folder that the engine wrote: that of one step, or its parent, which holds `latest`.",
    )


def _listing(path: Path) -> str:
    try:
        names = sorted(printable(entry.name) for entry in path.iterdir())
    except OSError as error:
        return f"; it cannot be listed: {error.strerror}"
    return f"; it holds {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "; it is empty"
