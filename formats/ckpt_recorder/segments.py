"""A new segment in a chain: its folder, its layout, and its line in `chain.json`. Rank 0 does it for all."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from ckpt_formats.core.errors import CkptError, Incomplete, Locked, Unsupported
from ckpt_formats.core.locking import unwritable
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain import folder, states
from ckpt_formats.universal.chain.file import ChainIndex, LoggedSteps
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.layout import SegmentLayout
from ckpt_formats.universal.gradients.segment import FOLDER

_DRAIN_SECONDS = 120.0


@dataclass(frozen=True)
class NewSegment:
    """A segment that the chain does not name yet."""

    path: Path
    layout: SegmentLayout
    lock: int
    """Rank 0's descriptor of its layout, which is locked, so that nobody takes the folder for what a crash left."""


def begin(run: Path, draft: SegmentLayout) -> NewSegment:
    """Make the folder and write the layout, which stands on the chain's state at its first step if there is one.

    What recorders that died left in the chain is removed. `publish` or `abandon` has to follow.

    Raises `Unsupported` if the chain has later steps, `Locked` if another run records into it, `OutputError`.
    """
    _wait_for_others(run)
    with _locked(run) as chain:
        chain = _ended(run, chain or ChainIndex(()), draft.first)
        folder.remove([one for one in folder.leftovers(run, chain) if index.SEGMENT_FOLDER.fullmatch(one.name)])
        parent = next((one.content for one in chain.members if one.step == draft.first), None)
        layout = replace(draft, parent=parent)
        path = _free(run, draft.first)
        try:
            path.mkdir()
            lock = _write_layout(path, layout)
        except OSError as error:
            raise unwritable(error, path) from error
    return NewSegment(path, layout, lock)


def publish(run: Path, segment: NewSegment) -> None:
    """Name the segment in the chain: from then on it can be restored from."""
    layout = segment.layout
    try:
        with _locked(run) as chain:
            chain = _ended(run, chain or ChainIndex(()), layout.first)
            now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            line = LoggedSteps(segment.path.name, layout.run, layout.first, None, layout.parent, now)
            folder.flush(segment.path)
            folder.replace(run, ChainIndex(chain.members, (*chain.segments, line)))
    finally:
        os.close(segment.lock)


def abandon(run: Path, segment: NewSegment) -> None:
    """Remove a segment that could not be begun. What cannot be removed now, the next recorder removes."""
    os.close(segment.lock)
    with suppress(CkptError, OSError), folder.locked(run, create=True) as chain:
        shutil.rmtree(segment.path)
        if chain is None and os.listdir(run) == [folder.LOCK]:  # nothing came of it
            os.unlink(run / folder.LOCK)
            os.rmdir(run)


@contextmanager
def _locked(run: Path) -> Iterator[ChainIndex | None]:
    """The chain, locked. Waits for a while if another process changes it: `ckpt append` may take minutes."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                chain = stack.enter_context(folder.locked(run, create=True))
                break
            except Locked:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield chain


def _write_layout(path: Path, layout: SegmentLayout) -> int:
    """The descriptor, locked until it is closed."""
    file = os.open(path / layouts.NAME, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        rest = memoryview(layouts.dump(layout))
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
        folder.flush(path)
    except BaseException:
        os.close(file)
        raise
    return file


def _ended(run: Path, chain: ChainIndex, first: int) -> ChainIndex:
    """The chain, with the end of its last segment written down. Raises `Unsupported` if there are later steps."""
    last = max((member.step for member in chain.members), default=first)
    segments = chain.segments
    if segments and segments[-1].step is None:
        if folder.is_growing(run / segments[-1].folder):
            raise _taken(run / segments[-1].folder)
        try:
            end = states.open_steps(run, segments[-1]).last
        except Incomplete:
            end = segments[-1].first  # a rank never began to write
        segments = (*segments[:-1], replace(segments[-1], step=end))
    last = max([last, *(one.step for one in segments[-1:] if one.step is not None)])
    if last > first:
        raise Unsupported(
            f"the chain has steps up to {last}, and the run is at step {first}",
            where=run,
            hint=f"To go on from step {first}, drop the later ones: `ckpt compact {run} --upto {first}`. "
            "Or record into another chain.",
        )
    return ChainIndex(chain.members, segments)


def _wait_for_others(run: Path) -> None:
    """Writers of a run that was killed end soon. Raises `Locked` if they do not: that run goes on."""
    chain = index.load(run / index.NAME) if (run / index.NAME).is_file() else ChainIndex(())
    deadline = time.monotonic() + _DRAIN_SECONDS
    for segment in chain.segments[-1:]:
        while folder.is_growing(run / segment.folder):
            if time.monotonic() > deadline:
                raise _taken(run / segment.folder)
            time.sleep(0.1)


def _taken(path: Path) -> Locked:
    return Locked("another run is recording into this chain", where=path, hint="Record into another chain.")


def _free(run: Path, first: int) -> Path:
    name, number = FOLDER.format(first), 0
    while (path := run / (name + (f".{number}" if number else ""))).exists():
        number += 1
    return path
