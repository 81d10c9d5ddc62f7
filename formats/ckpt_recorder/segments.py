"""The creation of a segment in a chain: its folder, its layout, and its line in `chain.json`. Only rank 0 does it."""

import fcntl
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from ckpt.chains.change import change
from ckpt.pipeline.resources import Execution
from ckpt_formats.core.errors import CkptError, IncompleteError, LockedError, UnsupportedError
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.publish import flush
from ckpt_formats.universal.chain import chain_file, folder, states
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.layout import SegmentLayout
from ckpt_formats.universal.gradients.segment import FOLDER

_DRAIN_SECONDS = 120.0


@dataclass(frozen=True)
class NewSegment:
    """A segment that `chain.json` does not name yet."""

    path: Path
    layout: SegmentLayout
    replaces: bool
    """Is the state at its first step another than that of the segment before it?"""
    lock: int
    """Rank 0's descriptor of the locked layout. The lock shows that the folder does not remain from a crash."""


def begin(run: Path, draft: SegmentLayout, *, replaces: bool = False) -> NewSegment:
    """Create the folder and write the layout. Its parent is the chain's state at the first step, if there is one.

    `replaces`: the segment before it does not have the state at the first step of this one.
    Removes folders that remain from recorders that were killed. The caller must call `publish` or `abandon` next.
    Raises `UnsupportedError` if the chain has later steps, `IncompleteError` if it lacks a file of the last ones,
    `LockedError` if another run records into it, and `OutputError`.
    """
    _wait_for_others(run)
    with change(run, Execution(), create=True, wait=_DRAIN_SECONDS) as changed:
        chain = _close_last_segment(run, changed.chain or ChainIndex(()), draft.first, replaces)
        changed.remove([one for one in changed.leftovers(chain) if _is_recorders(one.name)])
        parent = next((one.content for one in chain.members if one.step == draft.first and not replaces), None)
        layout = replace(draft, parent=parent)
        path = _unused_path(run, draft.first)
        try:
            path.mkdir()
            lock = _write_layout(path, layout)
        except OSError as error:
            raise unwritable(error, path) from error
    return NewSegment(path, layout, replaces, lock)


def publish(run: Path, segment: NewSegment) -> None:
    """Add the segment to `chain.json`, so that its steps can be restored."""
    layout = segment.layout
    try:
        with change(run, Execution(), create=True, wait=_DRAIN_SECONDS) as changed:
            chain = _close_last_segment(run, changed.chain or ChainIndex(()), layout.first, segment.replaces)
            now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            line = LoggedSteps(segment.path.name, layout.run, layout.first, None, layout.parent, now)
            flush(segment.path)
            changed.replace(replace(chain, segments=(*chain.segments, line)))
    finally:
        os.close(segment.lock)


def abandon(run: Path, segment: NewSegment) -> None:
    """Remove a segment that could not start. The next recorder removes what cannot be removed now."""
    os.close(segment.lock)
    with suppress(CkptError, OSError), change(run, Execution(), create=True) as changed:
        shutil.rmtree(segment.path)
        if changed.chain is None and os.listdir(run) == [folder.LOCK]:  # no other content
            os.unlink(run / folder.LOCK)
            os.rmdir(run)


def _is_recorders(name: str) -> bool:
    """Whether a recorder makes folders of this name."""
    return any(pattern.fullmatch(name) for pattern in (chain_file.SEGMENT_FOLDER, chain_file.PIECES_FOLDER))


def _write_layout(path: Path, layout: SegmentLayout) -> int:
    """Write the layout. Returns its descriptor, which is locked until it is closed."""
    file = os.open(path / layouts.NAME, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        remaining = memoryview(layouts.dump(layout))
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
        os.fsync(file)
        flush(path)
    except BaseException:
        os.close(file)
        raise
    return file


def _close_last_segment(run: Path, chain: ChainIndex, first: int, replaces: bool = False) -> ChainIndex:
    """The chain, in which the last segment states its last step: before `first`, if the next one replaces that state.

    Raises `UnsupportedError` if there are later steps, `IncompleteError` if a file of the segment is missing.
    """
    last = max((member.step for member in chain.members), default=first)
    segments = chain.segments
    if segments and segments[-1].step is None:
        if folder.is_growing(run / segments[-1].folder):
            raise _locked_error(run / segments[-1].folder)
        if not (run / segments[-1].folder).exists():  # somebody removed it while it was recorded
            return _close_last_segment(run, replace(chain, segments=segments[:-1]), first)
        try:
            end = states.open_steps(run, segments[-1]).last_recorded  # damaged steps stay: the list names them
        except IncompleteError as error:  # each rank had flushed its start before the list named the segment
            raise IncompleteError(
                f"the steps that were recorded last cannot be read: {error.what}",
                where=run / segments[-1].folder,
                hint="Restore the file. To give up these steps, remove the folder, or record into another chain.",
            ) from None
        if replaces and segments[-1].first < end == first:
            end -= 1
        segments = (*segments[:-1], replace(segments[-1], step=end))
    last = max([last, *(one.step for one in segments[-1:] if one.step is not None)])
    if last > first:
        raise UnsupportedError(
            f"the chain has steps up to {last}, and the run is at step {first}",
            where=run,
            hint=f"To continue from step {first}, drop the later steps: `ckpt compact {run} --upto {first}`. "
            "Or record into another chain.",
        )
    return replace(chain, segments=segments)


def _wait_for_others(run: Path) -> None:
    """Wait for the writers of a killed run to end. Raises `LockedError` if they do not, because that run continues."""
    chain = chain_file.load(run / chain_file.NAME) if (run / chain_file.NAME).is_file() else ChainIndex(())
    deadline = time.monotonic() + _DRAIN_SECONDS
    for segment in chain.segments[-1:]:
        while folder.is_growing(run / segment.folder):
            if time.monotonic() > deadline:
                raise _locked_error(run / segment.folder)
            time.sleep(0.1)


def _locked_error(path: Path) -> LockedError:
    return LockedError("another run is recording into this chain", where=path, hint="Record into another chain.")


def _unused_path(run: Path, first: int) -> Path:
    name, number = FOLDER.format(first), 0
    while (path := run / (name + (f".{number}" if number else ""))).exists():
        number += 1
    return path
