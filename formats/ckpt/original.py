"""The format and the file name that a checkpoint had before it was compressed."""

from dataclasses import replace
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint, OriginalForm
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.engines.torch_save import Torch
from ckpt_formats.registry import FORMATS, format_named, writable
from ckpt_formats.universal import Universal

_BY_SUFFIX = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")}


def original_format(
    source: Checkpoint, target: Path, format_name: str | None = None
) -> tuple[WritableFormat, tuple[Notice, ...]]:
    """The format that a checkpoint had, and notes about it.

    `format_name` or the ending of the target overrides it. Universal if the format cannot hold the whole checkpoint.
    """
    original = source.original
    chosen = format_name or _BY_SUFFIX.get(target.suffix)
    notes: tuple[Notice, ...] = ()
    if chosen or original is None:
        format = writable(chosen or Universal.name)
    else:
        format, notes = _former(source, original)
    if original is not None and original.format == format.name and original.form is not None:
        if original.form() is None:
            text = (
                f"the layout of the original file is unknown; the result has that of `ckpt convert --to {format.name}`"
            )
            notes = (*notes, Notice(text, weight=Weight.UNSURE))
        if isinstance(format, Torch):
            format = replace(format, original=True)
    return format, notes


def original_path(source: Checkpoint, target: Path, format: WritableFormat, format_name: str | None = None) -> Path:
    """The path to write to. In an existing folder, a single file gets its old name; else its old ending if none."""
    original = source.original
    if original is None or original.file is None or original.format != format.name:
        return target
    if target.is_dir():
        return target / original.file
    chosen = format_name or _BY_SUFFIX.get(target.suffix)
    return target.with_name(target.name + Path(original.file).suffix) if not chosen and not target.suffix else target


def _former(source: Checkpoint, original: OriginalForm) -> tuple[WritableFormat, tuple[Notice, ...]]:
    """The format that a checkpoint had; universal if ckpt cannot write it, or if it cannot hold it all."""
    format = format_named(original.format) if original.format in FORMATS else None
    if not isinstance(format, WritableFormat):
        return Universal(), ()
    try:
        dropped = format.for_target(Path(original.file or "")).plan(source).dropped
    except Unsupported as error:
        dropped = (Notice(error.what),)
    if not dropped:
        return format, ()
    text = f"universal, since {format.name} cannot hold all of it: {'; '.join(map(str, dropped))}"
    return Universal(), (Notice(text, weight=Weight.UNSURE),)
