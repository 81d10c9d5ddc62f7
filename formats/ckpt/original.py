"""A checkpoint that is compressed, and that becomes again what it was: its format, and the names of single files."""

from dataclasses import replace
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint, OriginalForm
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.engines.torch_save import Torch
from ckpt_formats.registry import format_named, writable
from ckpt_formats.registry.endings import ENDINGS, SINGLE_UNIVERSAL, format_of_ending
from ckpt_formats.universal import Universal


def compressed_path(source: Checkpoint, target: Path, is_folder: bool = False) -> tuple[Path, tuple[Notice, ...]]:
    """The path to which a checkpoint is compressed: a single file becomes a single file, whose name ends in `.ucp`.

    A file goes into an existing folder under its own name. `is_folder`: a folder is wanted, also of a single file.
    """
    if not source.path.is_file() or is_folder or target.suffix.lower() == SINGLE_UNIVERSAL:
        return target, ()
    if target.is_dir():
        return target / f"{source.path.stem}{SINGLE_UNIVERSAL}", ()
    if target.suffix.lower() not in ENDINGS:
        return target.with_name(f"{target.name}{SINGLE_UNIVERSAL}"), ()
    named = target.with_suffix(SINGLE_UNIVERSAL)
    text = f"the target is {printable(named.name)}: what is compressed is in the universal format"
    return named, (Notice(text, weight=Weight.UNSURE),)


def original_format(
    source: Checkpoint, target: Path, format_name: str | None = None
) -> tuple[WritableFormat, tuple[Notice, ...]]:
    """The format that a checkpoint had, and notes about it.

    `format_name` or the ending of the target overrides it. Universal if the format cannot hold the whole checkpoint.
    """
    original = source.original
    chosen = format_name or format_of_ending(target)
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
        is_single = format.name == Universal.name and source.path.is_file() and not target.suffix
        return target.with_name(f"{target.name}{SINGLE_UNIVERSAL}") if is_single and not target.is_dir() else target
    if target.is_dir():
        return target / original.file
    chosen = format_name or ENDINGS.get(target.suffix.lower())
    return target.with_name(target.name + Path(original.file).suffix) if not chosen and not target.suffix else target


def _former(source: Checkpoint, original: OriginalForm) -> tuple[WritableFormat, tuple[Notice, ...]]:
    """The format that a checkpoint had; universal if ckpt cannot write it, or if it cannot hold it all."""
    try:
        format = format_named(original.format)
    except (InvalidArgumentError, UnsupportedError) as error:  # of a package that is not here, or is broken
        text = f"universal, since the checkpoint was in format {printable(original.format)}: {error.what}"
        return Universal(), (Notice(text, weight=Weight.UNSURE),)
    if not isinstance(format, WritableFormat):
        return Universal(), ()
    try:
        dropped = format.for_target(Path(original.file or "")).plan(source).dropped
    except (InvalidArgumentError, UnsupportedError) as error:
        dropped = (Notice(error.what),)
    if not dropped:
        return format, ()
    text = f"universal, since {format.name} cannot hold all of it: {'; '.join(map(str, dropped))}"
    return Universal(), (Notice(text, weight=Weight.UNSURE),)
