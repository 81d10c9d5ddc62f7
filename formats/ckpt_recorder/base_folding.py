"""Fold the pieces of a base: bring all to one step by the log, write a base, compare it with the log, and name it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ckpt.chains.replay_check import check_state
from ckpt.pipeline import Execution
from ckpt.shadow.bases import add_base
from ckpt_codecs.optimizers import WEIGHTS
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain import folder as chain_folder
from ckpt_formats.universal.chain.chain_file import LoggedSteps, Member
from ckpt_formats.universal.chain.members import open_member
from ckpt_formats.universal.chain.states import nearest_base, open_steps
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.replay import SegmentReplay, StartState, States
from ckpt_formats.universal.gradients.segment import Segment, open_layout
from ckpt_formats.universal.gradients.state import Base, checkpoint_of, replay_to
from ckpt_recorder.base_pieces import StatePieces, missing_rank, open_pieces

_SHORTEST, _LONGEST = 0.01, 1.0
"""Seconds between two looks at files: twice as long each time."""


@dataclass(frozen=True, eq=False)
class FoldedReplay(SegmentReplay):
    """The state at the step of a base. Each chunk starts from its piece and goes through the steps after it."""

    pieces: StatePieces = field(kw_only=True)

    @cached_property
    def states_of(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._names_of(number) for number in range(len(self.segment.layout.optimizers)))

    def _names_of(self, optimizer: int) -> tuple[str, ...]:
        """The names of the states that an optimizer changes, as far as a piece or a step gives them."""
        update = self.first_updates.get(optimizer)
        if update is None:
            return tuple(dict.fromkeys([WEIGHTS, *sorted(self.pieces.names)]))
        stepped = [name for group in range(len(update.groups)) for name in self.step_of(update, group).states]
        if update.record.step > self.step:  # it has not stepped since the segment began
            stepped = [name for name in stepped if name in self.pieces.names]
        return tuple(dict.fromkeys([WEIGHTS, *stepped]))

    def _replay(self, rank: int, index: int, reader: Reader) -> States:
        layout = self.segment.layout.ranks[rank]
        low, high = layout.chunk_bounds(index)
        states = {name: np.zeros(high - low, np.float32) for name in self.states}
        step = self.pieces.read(rank, index, states, reader)
        self.advance(rank, index, list(layout.ranges(index)), states, step, reader)
        return states


def fold(
    run: Path, segment: str, pieces: Path, step: int, seconds: Callable[[], float], resources: Execution
) -> Member:
    """Make a base of the pieces in a folder, and add it to the chain. Returns the new member.

    Args:
        run: The chain.
        segment: The name of the segment's folder.
        pieces: The folder of the pieces.
        step: The step of the base.
        seconds: Gives how long to wait in all for the pieces of other ranks: not as long once the trainer has ended.
        resources: How much of the machine to use.

    Raises:
        CkptError: The base was not added: pieces are missing or damaged, the base differs from the log, the chain has
            a later state, the disk is full. The chain is as it was.
    """
    layout, heads = open_layout(run / segment)
    _await_pieces(pieces, len(heads), seconds)
    logged = _logged(run, segment)
    logged_steps = _with_step(run, logged, step)
    parts = open_pieces(pieces, layout, heads)
    if parts.step != step:
        raise CorruptError(f"these are the pieces of step {parts.step}", where=pieces)
    chain = chain_file.read(run)
    member = nearest_base(chain, logged, step)
    base = None if member is None else Base(member.step, open_member(run, chain, member))
    expected = replay_to(logged_steps, step, base)
    if not logged_steps.is_exact and parts.first < step:
        raise UnsupportedError("a replay of this log is approximate: it cannot bring pieces to one step", where=run)
    # Values that are not replayed have no error, even if the log is approximate.
    start = expected.start if logged_steps.is_exact else StartState(step, expected.start.parameters)
    folded = checkpoint_of(
        FoldedReplay(logged_steps, step, start, pieces=parts), None if base is None else base.checkpoint
    )

    def compare(written: Checkpoint) -> None:
        """Raise `CorruptError` if the base that was written has other values than the log gives exactly."""
        findings = check_state(expected, written.parameters, resources) if expected.segment.is_exact else []
        if findings:
            raise CorruptError(f"the base differs from the log: {findings[0].what}", where=run)

    return add_base(run, folded, step, logged.folder, compare, resources)


def _with_step(run: Path, logged: LoggedSteps, step: int) -> Segment:
    """The segment, once it has all records of a step. Raises `IncompleteError` if it ends before."""
    pause = _SHORTEST
    while True:
        is_growing = chain_folder.is_growing(run / logged.folder)
        segment = open_steps(run, logged)
        if segment.last >= step and (_has_notes(segment, step) or not is_growing):
            return segment
        if not is_growing:
            raise IncompleteError(f"the log ends before step {step}", where=segment.folder)
        time.sleep(pause)  # the training may pause for hours
        pause = min(2 * pause, _LONGEST)


def _has_notes(segment: Segment, step: int) -> bool:
    """Are the notes of a step complete? They come after its gradients, and before those of the next step."""
    fingerprints = (record.step for record in segment.records(0, Kind.FINGERPRINT))
    return segment.last > step or segment.has_ended or step in fingerprints


def _logged(run: Path, segment: str) -> LoggedSteps:
    logged = next((one for one in chain_file.read(run).segments if one.folder == segment), None)
    if logged is None:
        raise NotFoundError("the chain has dropped the segment", where=run / segment)
    return logged


def _await_pieces(pieces: Path, world: int, seconds: Callable[[], float]) -> None:
    """Wait until all ranks have written their pieces. Raises `IncompleteError` after some seconds."""
    begin, pause = time.monotonic(), _SHORTEST
    while (rank := missing_rank(pieces, world)) is not None:
        if time.monotonic() > begin + seconds():
            raise IncompleteError(f"rank {rank} has not written its pieces", where=pieces)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
