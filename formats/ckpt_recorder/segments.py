"""A new segment in a chain: its folder, its layout, and its line in `chain.json`. Rank 0 does it for all."""

import fcntl
import os
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from ckpt_formats.chain import folder, index, states
from ckpt_formats.chain.index import Chain, LoggedSteps
from ckpt_formats.errors import Incomplete, Locked, Unsupported
from ckpt_formats.gradients import layout as layouts
from ckpt_formats.gradients.layout import Layout
from ckpt_formats.gradients.segment import FOLDER, rank_file
from ckpt_formats.locking import unwritable

_DRAIN_SECONDS = 120.0


@dataclass(frozen=True)
class NewSegment:
    """A segment that the chain does not name yet."""

    path: Path
    layout: Layout


def begin(run: Path, draft: Layout) -> NewSegment:
    """Make the folder and write the layout, which stands on the chain's state at its first step if there is one.

    Raises `Unsupported` if the chain has later steps, `Locked` if another run records into it, `OutputError`.
    """
    with folder.locked(run, create=True) as chain:
        chain = _ended(run, chain or Chain(()), draft.first)
        parent = next((one.content for one in chain.members if one.step == draft.first), None)
        layout = replace(draft, parent=parent)
        path = _free(run, draft.first)
        try:
            path.mkdir()
            content = layouts.dump(layout)
            with (path / layouts.NAME).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            folder.flush(path)
        except OSError as error:
            raise unwritable(error, path) from error
    return NewSegment(path, layout)


def publish(run: Path, segment: NewSegment) -> None:
    """Name the segment in the chain: from then on it can be restored from."""
    layout = segment.layout
    with folder.locked(run, create=True) as chain:
        chain = _ended(run, chain or Chain(()), layout.first)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        line = LoggedSteps(segment.path.name, layout.run, layout.first, None, layout.parent, now)
        folder.flush(segment.path)
        folder.replace(run, Chain(chain.members, (*chain.segments, line)))


def _ended(run: Path, chain: Chain, first: int) -> Chain:
    """The chain, with the end of its last segment written down. Raises `Unsupported` if there are later steps."""
    last = max((member.step for member in chain.members), default=first)
    segments = chain.segments
    if segments and segments[-1].step is None:
        _wait_for_writers(run / segments[-1].folder)
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
    return Chain(chain.members, segments)


def _wait_for_writers(path: Path) -> None:
    """Writers of a run that was killed end soon. Raises `Locked` if they do not: that run goes on."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    for file in sorted(path.glob(rank_file(0).replace("00000", "*"))):
        with file.open("rb") as opened:
            while True:
                try:
                    fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise Locked(
                            "another run is recording into this chain", where=file, hint="Record into another chain."
                        ) from None
                    time.sleep(0.1)


def _free(run: Path, first: int) -> Path:
    name, number = FOLDER.format(first), 0
    while (path := run / (name + (f".{number}" if number else ""))).exists():
        number += 1
    return path


