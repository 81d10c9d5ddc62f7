"""One checkpoint: the index at a path, with notices about the files next to it."""

from dataclasses import replace
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint, Opened, OriginalForm
from ckpt_formats.core.errors import CorruptError, form_of
from ckpt_formats.core.folders import is_of_trainer, names_in
from ckpt_formats.core.format import Format, ReadOptions, identified
from ckpt_formats.core.text import printable
from ckpt_formats.registry.checks import OpenedCheckpoint, check
from ckpt_formats.registry.location import Located, locate
from ckpt_formats.registry.seal_places import seal_files_of
from ckpt_formats.registry.shard_alone import check_alone


def open_one(path: Path, options: ReadOptions) -> Checkpoint:
    """The index of the checkpoint at a path. Raises subclasses of `CkptError`."""
    is_file = path.is_file()
    if is_file:
        check_alone(path)
    located = locate(path)
    format = located.format
    try:
        with form_of(format.name, path):  # the last guard: readers name the place where they can
            checkpoint = identified(lambda: _sealed(located, options))
    except CorruptError as error:
        error.where = error.where or printable(str(path))
        raise
    notices = check(OpenedCheckpoint(path, located, checkpoint))
    shapes = options.shapes
    missing_files = (True,) if options.missing_files else ()
    stated = (options.rules, options.order, options.orders, None if shapes is None else shapes.history, *missing_files)
    identities = {} if shapes is None else shapes.identities
    original = checkpoint.original
    if not format.is_own and (original is None or original.format != format.name):
        original = OriginalForm(format.name, path.name if is_file else None)
    return replace(
        checkpoint,
        notices=notices,
        history=(Opened(path, stated),),
        identities={**identities, **checkpoint.identities},
        original=original,
    )


def _sealed(located: Located, options: ReadOptions) -> Checkpoint:
    """The checkpoint with the checksums that a seal file has of it."""
    checkpoint = _read(located, options)
    if located.format.is_own:
        return checkpoint
    seal_files = seal_files_of({file.path for file in checkpoint.files} | {located.path}, located.path)
    if not seal_files:
        return checkpoint
    from ckpt_formats.registry.seal_file import with_seals  # few checkpoints have one

    return with_seals(checkpoint, located.path, seal_files)


def _read(located: Located, options: ReadOptions) -> Checkpoint:
    """The checkpoint, with the files that a trainer saved next to it."""
    checkpoint = _read_by(located.format, located.path, options)
    if not located.format.is_of_engine or not located.path.is_dir():
        return checkpoint
    if not any(map(is_of_trainer, names_in(located.path))):
        return checkpoint
    from ckpt_formats.engines.hf.trainer_files import with_run_around  # it imports the reader of torch's files

    return with_run_around(checkpoint, located.path)


def _read_by(format: Format, path: Path, options: ReadOptions) -> Checkpoint:
    if type(format).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return format.read(path, options)
    from ckpt_formats.registry.plugins import blamed_on_package, returned  # only other packages need it

    with blamed_on_package(format):
        return returned(format.read(path, options), Checkpoint)
