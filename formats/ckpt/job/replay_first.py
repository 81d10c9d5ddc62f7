"""States of a chain are replayed once, before a format that reads one tensor after the other writes them.

Otherwise each delta would be replayed several times.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckpt import pipeline
from ckpt.pipeline.folder_target import REPLAYED
from ckpt.pipeline.target import StagedTarget
from ckpt_formats.core.checkpoint import Checkpoint, Opened
from ckpt_formats.core.errors import NoSpaceError, OutputError
from ckpt_formats.core.format import ReadOptions, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.text import PARTIAL, format_nbytes
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.write_replayed import replays_of_boxes, stored_delta_of

Write = Callable[[Checkpoint, Path, Universal], object]
"""Writes a state to a folder in the universal format."""


def is_replayed_first(source: Checkpoint, format: WritableFormat) -> bool:
    """Would chunks be replayed several times if the format read one tensor after the other?"""
    if isinstance(format, Universal):
        return False
    replays = (stored_delta_of(parameter) for parameter in source.parameters.values())
    several = any(replay is not None and replay.chunking.count > 1 for replay in replays)
    return several or any(map(replays_of_boxes, source.parameters.values()))


def replay_notice(source: Checkpoint) -> Notice:
    """A notice of the space that the replayed state takes."""
    nbytes = format_nbytes(_universal_nbytes(source))
    return Notice(f"the state is first replayed next to the target, which takes {nbytes} more")


def with_content(source: Checkpoint, format: Universal) -> Universal:
    """The format, with the content id of the source if it has one: the result must have the same."""
    path = source.path / manifest.NAME
    if _is_edited(source) or not path.is_file() or type(format) is not Universal or format.codec is not None:
        return format
    stated = manifest.load(path)
    return format if stated.boxes is not None else Universal(content=stated.content)


def replayed(source: Checkpoint, stage: StagedTarget, needed: int, write: Write) -> Checkpoint:
    """Replay a state into the workspace of a target, with which it is removed. Returns it without deltas.

    What an interrupted run replayed there of the same state is used, and what it replayed of others is removed. Raises
    `NoSpaceError` unless there is space for it, and for `needed` bytes that the target takes.
    """
    folder = stage.workspace / f"{REPLAYED}{_name_of(source)}"
    for other in stage.workspace.glob(f"*{REPLAYED}*"):
        if other.name.removeprefix(".").removesuffix(PARTIAL) != folder.name:
            shutil.rmtree(other, ignore_errors=True)
    if not folder.is_dir():
        _check_space(stage, _universal_nbytes(source) + needed)
        try:
            write(source, folder, with_content(source, Universal()))
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror or error}", where=stage.workspace) from error
    state = Universal().read(folder, ReadOptions())
    return replace(state, history=source.history)


def _name_of(source: Checkpoint) -> str:
    """A name that differs from those of other states: from the content id, or from the files that are read, and edits.

    The same path and step may be those of another state later.
    """
    path = source.path / manifest.NAME
    if path.is_file() and not _is_edited(source):
        return manifest.load(path).content.removeprefix("blake2b-256:")[:16]
    return pipeline.job_id(source, source.identities, Universal())[:16]


def _is_edited(source: Checkpoint) -> bool:
    return any(not isinstance(edit, Opened) for edit in source.history)


def _universal_nbytes(source: Checkpoint) -> int:
    return pipeline.space_needed(Universal().plan(source).files)


def _check_space(stage: StagedTarget, needed: int) -> None:
    """Raise `NoSpaceError` if there is too little space. Bytes that an interrupted run wrote are not written again."""
    written = sum(path.stat().st_size for path in stage.workspace.rglob("*") if path.is_file())
    free = shutil.disk_usage(stage.disk.parent).free
    if needed > free + written:
        raise NoSpaceError(
            f"the target takes {format_nbytes(needed)}: the state is first replayed next to it; "
            f"{format_nbytes(free)} are free",
            where=stage.disk,
            hint="Free some; or write it as universal, which needs no temporary space.",
        )
