"""The index of the checkpoint at a path, with notices about the files next to it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ckpt_formats.containers.torchfile import check_repeated, written_size
from ckpt_formats.core.checkpoint import Checkpoint, Opened, OriginalForm, Parameter
from ckpt_formats.core.claims import MAX_NAME
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError, form_of
from ckpt_formats.core.folders import is_of_trainer, names_in
from ckpt_formats.core.format import Format, ReadOptions, identified
from ckpt_formats.core.gc_pause import gc_paused
from ckpt_formats.core.missing_states import check_states
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.registry.carried import notices_of_carried
from ckpt_formats.registry.downloads import unfinished_downloads
from ckpt_formats.registry.endings import notices_of_content
from ckpt_formats.registry.location import Located, locate
from ckpt_formats.registry.seal_places import seal_files_of
from ckpt_formats.registry.shard_alone import check_alone, check_whole_of_meta, check_world, parts_unread
from ckpt_formats.registry.stated_steps import contradicting_steps
from ckpt_formats.registry.traces import check_traces
from ckpt_formats.registry.unread_files import unread

_OF_ENGINES = ("deepspeed", "deepspeed-universal", "megatron", "megatron-legacy", "dcp", "fsdp-ranks")
"""Formats of engines: trainers of Hugging Face's save files of their own next to them."""
_MAX_FOLDERS = 16
"""How many folders of a checkpoint are searched for traces of another engine."""
OWN_FORMATS = ("universal", "chain")
"""Formats of ckpt: their files state the original format."""


_ROW_NBYTES = 13
"""What a parameter takes at least in an index of columns: each has a row, although many share their values."""


@gc_paused()
def open_checkpoint(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """The index of the checkpoint at a path, of any format. Reads headers only.

    Its notices name files in its folder that are not read. Raises subclasses of `CkptError`; if the path is the folder
    of a run, the hint names its newest whole checkpoint.
    """
    try:
        return _opened(path, options)
    except CkptError as error:
        from ckpt_formats.registry.newest_whole import hint_newest_whole  # only a damaged run needs it

        hint_newest_whole(path, error, lambda other: _opened(other, options))
        raise


def _opened(path: Path, options: ReadOptions | None) -> Checkpoint:
    if is_file := path.is_file():
        check_alone(path)
    located = locate(path)
    format = located.format
    try:
        with form_of(format.name, path):  # the last guard: readers name the place where they can
            checkpoint = identified(lambda: _sealed(located, options or ReadOptions()))
    except CorruptError as error:
        error.where = error.where or printable(str(path))
        raise
    if not checkpoint.parameters and format.name not in OWN_FORMATS:
        raise NotFoundError("has no tensor: it is no checkpoint", where=printable(str(located.path)))
    _check_names(checkpoint, path)
    _check_folders(checkpoint, located)
    check_whole_of_meta(checkpoint)
    check_world(checkpoint, format.name)
    written = [
        checkpoint.extras,
        [group.options for group in checkpoint.groups],
        _values(checkpoint.parameters),
    ]
    # Here, so that every command gives the same answer.
    check_repeated(written, printable(str(path)), *_rows_and_repeats(checkpoint.parameters))
    notices = (*located.notices, *checkpoint.notices)
    if format.name not in OWN_FORMATS:
        notices = (
            *notices,
            *notices_of_carried(checkpoint),
            *unfinished_downloads(checkpoint),
            *contradicting_steps(checkpoint, located.path),
            *check_states(checkpoint.parameters, checkpoint.groups, located.path, even=format.even_states),
        )
    if is_file:
        notices = (*notices, *notices_of_content(path, format.name), *parts_unread(path))
    elif format.name not in OWN_FORMATS:
        named = {name for notice in notices for name in notice.names}
        notices = (*notices, *unread(path, (shard.path for shard in checkpoint.files), named))
    used = options or ReadOptions()
    shapes = None if used.shapes is None else used.shapes.history
    missing_files = (True,) if used.missing_files else ()
    opened = Opened(path, (used.rules, used.order, used.orders, shapes, *missing_files))
    identities = {} if used.shapes is None else used.shapes.identities
    checkpoint = replace(
        checkpoint, notices=notices, history=(opened,), identities={**identities, **checkpoint.identities}
    )
    if format.name in OWN_FORMATS or (checkpoint.original is not None and checkpoint.original.format == format.name):
        return checkpoint
    return replace(checkpoint, original=OriginalForm(format.name, path.name if is_file else None))


def _check_names(checkpoint: Checkpoint, path: Path) -> None:
    """Raise `CorruptError` if a tensor's name is longer than any that a model has."""
    longest = max(map(len, checkpoint.parameters), default=0)
    if longest > MAX_NAME:
        raise CorruptError(
            f"a tensor's name has {longest:,} characters; ckpt reads at most {MAX_NAME:,}", where=printable(str(path))
        )


def _values(parameters: Mapping[str, Parameter]) -> Sequence[Mapping[str, Value]]:
    """The values of all parameters; those of a table once. Raises what a parameter raises that cannot be made."""
    if not isinstance(parameters, TabulatedParameters):
        return [parameter.values for parameter in parameters.values()]
    parameters.check()
    table = parameters.table
    return [table.values[number] for number in np.unique(table.value).tolist()]


def _rows_and_repeats(parameters: Mapping[str, Parameter]) -> tuple[int, int]:
    """What a table of parameters takes in its file, at least, and what is written again of values that many have."""
    if not isinstance(parameters, TabulatedParameters):
        return 0, 0
    table = parameters.table
    numbers, counts = np.unique(table.value, return_counts=True)
    repeats = zip(numbers.tolist(), counts.tolist(), strict=True)
    again = sum((count - 1) * written_size(table.values[number]) for number, count in repeats if count > 1)
    return _ROW_NBYTES * len(parameters), again


def _sealed(located: Located, options: ReadOptions) -> Checkpoint:
    """The checkpoint with the checksums that a seal file has of it."""
    checkpoint = _read(located, options)
    if located.format.name in OWN_FORMATS:
        return checkpoint
    seal_files = seal_files_of({file.path for file in checkpoint.files} | {located.path}, located.path)
    if not seal_files:
        return checkpoint
    from ckpt_formats.registry.seal_file import with_seals  # few checkpoints have one

    return with_seals(checkpoint, located.path, seal_files)


def _read(located: Located, options: ReadOptions) -> Checkpoint:
    """The checkpoint, with the files that a trainer saved next to it."""
    checkpoint = _read_by(located.format, located.path, options)
    if located.format.name not in _OF_ENGINES or not located.path.is_dir():
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


def _check_folders(checkpoint: Checkpoint, located: Located) -> None:
    """Raise `IncompleteError` if files were read from a folder with traces of another engine."""
    folders = dict.fromkeys(shard.path.parent for shard in checkpoint.files)
    for folder in [folder for folder in folders if folder != located.path][:_MAX_FOLDERS]:
        if folder.is_relative_to(located.path):
            check_traces(folder, set(names_in(folder)), located.format.name)
