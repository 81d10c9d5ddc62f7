"""The segments of a chain's log of gradients; those that cannot be read have an error."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_formats.core.errors import CkptError
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps

if TYPE_CHECKING:
    from ckpt_formats.universal.gradients.segment import Segment


@dataclass(frozen=True)
class SegmentView:
    """A segment, or why it cannot be read."""

    logged: LoggedSteps
    segment: "Segment | None"
    error: CkptError | None = None

    @property
    def has_ended(self) -> bool:
        """Is its end known: was it closed, or did the next one begin?"""
        return self.logged.step is not None or (self.segment is not None and self.segment.has_ended)

    @property
    def last(self) -> int | None:
        """The last step that can be restored."""
        return None if self.segment is None else self.segment.last


def open_segments(run: Path, chain: ChainIndex, check: bool = False) -> list[SegmentView]:
    """All segments of a chain. With `check`, each stored byte is compared with its hash."""
    return [_open(run, logged, check) for logged in chain.segments]


def _open(run: Path, logged: LoggedSteps, check: bool) -> SegmentView:
    from ckpt_formats.universal.chain.states import open_steps  # most chains have no log of gradients

    try:
        segment = open_steps(run, logged, 0 if check else None)
        segment.last  # noqa: B018  # reads the header of each record
        if check:
            segment.group_options(segment.last)  # raises if notes have others than there are groups
    except CkptError as error:
        return SegmentView(logged, None, error)
    return SegmentView(logged, segment)


def steps_nbytes(segment: "Segment") -> int:
    """Bytes of the gradients, or of the states after each step, of all steps that count; without other fields."""
    from ckpt_formats.core.files import Reader
    from ckpt_formats.universal.gradients.record import Kind

    total = sum(
        record.nbytes
        for log in segment.logs
        for record in log.records
        if record.kind in (Kind.VALUES, Kind.STATE) and segment.first < record.step <= segment.last
    )
    count = segment.last - segment.first
    with Reader(check=False) as reader:
        for rank, steps in enumerate(segment.updates):
            chunks, path = segment.layout.ranks[rank].chunk_count, segment.path(rank)
            total += sum(
                update.record.nbytes_of(path, chunks, reader) for updates in steps[:count] for update in updates
            )
    return total
