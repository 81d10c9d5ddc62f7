"""Formats by name. To add one: write its file, add its line.

Values are import paths, not classes, so that the names cost nothing to look at.
The order is the order of detection: the more particular first.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_formats.errors import NotFound, Unsupported
from ckpt_formats.naming import PARTIAL, show

if TYPE_CHECKING:
    from ckpt_formats.base import Checkpoint, Format, Options, WritableFormat

FORMATS: dict[str, str] = {
    "universal": "ckpt_formats.universal:Universal",
    "chain": "ckpt_formats.chain.format:ChainFormat",
    "deepspeed-universal": "ckpt_formats.deepspeed_universal:DeepSpeedUniversal",
    "megatron": "ckpt_formats.megatron:MegatronDist",
    "megatron-legacy": "ckpt_formats.megatron:MegatronLegacy",
    "deepspeed": "ckpt_formats.deepspeed:DeepSpeed",
    "hf": "ckpt_formats.hf:HuggingFace",
    "fsdp-ranks": "ckpt_formats.fsdp_ranks:FsdpRanks",
    "dcp": "ckpt_formats.dcp:DCP",
    "safetensors": "ckpt_formats.safetensors:Safetensors",
    "torch": "ckpt_formats.plain_torch:PlainTorch",
}
ONLY_READ = ("chain", "fsdp-ranks")
"""What `convert` and its like cannot write. `writable` says so, too, but has to import the format."""
_OURS = ("universal", "chain")
"""What is in these says itself what it was before."""


def format_named(name: str) -> "Format":
    """The format of this name."""
    module, _, attribute = FORMATS[name].partition(":")
    format: Format = getattr(import_module(module), attribute)()
    return format


def writable(name: str) -> "WritableFormat":
    """The format of this name, for writing. Raises `Unsupported` if it can only be read."""
    from ckpt_formats.base import WritableFormat

    format = format_named(name)
    if not isinstance(format, WritableFormat):
        raise Unsupported(f"{name} can be read, not written", hint="Convert to `universal`, which holds everything.")
    return format


def detect(path: Path) -> "Format":
    """The first format that knows this path. Raises `NotFound` if none does."""
    try:
        path.stat()
    except FileNotFoundError:
        raise NotFound("there is nothing at this path", where=show(str(path))) from None
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}", where=show(str(path))) from error
    if any(part.endswith(PARTIAL) for part in path.absolute().parts):
        raise NotFound(
            "not a checkpoint yet, but what an interrupted run left behind",
            where=show(str(path)),
            hint="Run the same command again to go on, or remove the folder.",
        )
    for name in FORMATS:
        format = format_named(name)
        if format.detect(path):
            return format
    held = "" if path.is_file() else _listing(path)
    raise NotFound(
        f"not a checkpoint that we know ({', '.join(FORMATS)}){held}",
        where=show(str(path)),
        hint="Name the folder that the engine wrote: the one of one step, or the one above that holds `latest`.",
    )


def open_checkpoint(path: Path, options: "Options | None" = None) -> "Checkpoint":
    """The index of the checkpoint at a path, whatever its format. Reads headers only."""
    from dataclasses import replace

    from ckpt_formats.base import Options, SavedAs
    from ckpt_formats.torchfile import check_repeated

    format = detect(path)
    found = format.read(path, options or Options())
    written = [found.extras, [group.options for group in found.groups], [p.values for p in found.parameters.values()]]
    check_repeated(written, show(str(path)))  # here, so that every command says the same
    if format.name in _OURS or (found.saved_as is not None and found.saved_as.format == format.name):
        return found
    return replace(found, saved_as=SavedAs(format.name, path.name if path.is_file() else None))


def _listing(path: Path) -> str:
    try:
        names = sorted(show(entry.name) for entry in path.iterdir())
    except OSError as error:
        return f"; it cannot be listed: {error.strerror}"
    return f"; it holds {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "; it is empty"
