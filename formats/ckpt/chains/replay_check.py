"""Repeat the steps of the log, and compare the results with the run and with the states that the chain stores."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt.findings.report import Finding
from ckpt.pipeline import CountBytes, Resources
from ckpt.pipeline.executors import run_tasks
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.universal.chain.chain_file import ChainIndex
from ckpt_formats.universal.chain.members import OpenedMembers, member_at
from ckpt_formats.universal.chain.states import open_steps
from ckpt_formats.universal.gradients.replay import SegmentReplay, StartState
from ckpt_formats.universal.gradients.segment import Segment
from ckpt_formats.universal.gradients.state import Base, checkpoint_at, replay_to

_SIZE = 4
"""Bytes of a gradient."""


@dataclass(frozen=True)
class SegmentCourse:
    """A segment, the state where it begins, and the states that the chain stores of its steps."""

    segment: Segment
    start: StartState
    stops: tuple[StartState, ...]

    @property
    def nbytes(self) -> int:
        """Of all gradients, decoded."""
        return (self.segment.last - self.start.step) * self.segment.layout.numel * _SIZE


def courses(run: Path, chain: ChainIndex, members: OpenedMembers) -> Iterator[SegmentCourse]:
    """All segments with their states. Raises as `open_steps`."""
    for number, logged in enumerate(chain.segments):
        segment = open_steps(run, logged)
        stops: dict[int, StartState] = {}
        for member in chain.members:
            if segment.first < member.step <= segment.last and member.exact:
                stops[member.step] = StartState(member.step, members.open(member).parameters)
        following = chain.segments[number + 1] if number + 1 < len(chain.segments) else None
        if following is not None and following.parent is None and segment.first < following.first <= segment.last:
            stops.setdefault(following.first, StartState(following.first, _own_start(open_steps(run, following))))
        base: Base | None = None
        if logged.parent is not None:
            base = Base(logged.first, members.open(member_at(run, chain, logged.first)))
        start = replay_to(segment, segment.first, base).start
        checkpoint_at(segment, segment.last, base)  # raises if its notes, values or generators give no state
        yield SegmentCourse(segment, start, tuple(stop for _, stop in sorted(stops.items())))


def _own_start(segment: Segment) -> dict[str, Parameter]:
    return dict(checkpoint_at(segment, segment.first, None).parameters)


def check(course: SegmentCourse, resources: Resources, count_bytes: CountBytes) -> list[Finding]:
    """Repeat all steps of a segment, and compare with its fingerprints and with the states that the chain stores.

    If a stored state is equal to that of the log, the next steps start from it; if not, they start where the last did.
    """
    findings: list[Finding] = []
    start = course.start
    for stop in course.stops:
        problems = _check_leg(SegmentReplay(course.segment, stop.step, start), stop, resources, count_bytes)
        findings += problems
        start = start if problems else stop
    return findings + _check_leg(
        SegmentReplay(course.segment, course.segment.last, start), None, resources, count_bytes
    )


def check_state(replay: SegmentReplay, parameters: Mapping[str, Parameter], resources: Resources) -> list[Finding]:
    """Repeat the steps of a replay, and compare the result with a state of the same step, bit for bit."""
    return _check_leg(replay, StartState(replay.step, parameters), resources, lambda nbytes: None)


def _check_leg(
    replay: SegmentReplay, stop: StartState | None, resources: Resources, count_bytes: CountBytes
) -> list[Finding]:
    layout = replay.segment.layout
    chunks = [(rank, index) for rank, one in enumerate(layout.ranks) for index in range(one.chunk_count)]
    stored = None if stop is None else SegmentReplay(replay.segment, replay.step, stop)

    def check_chunk(chunk: tuple[int, int]) -> Finding | None:
        with Reader(check=False) as reader:
            finding = _check_chunk(replay, stored, *chunk, reader)
        low, high = layout.ranks[chunk[0]].chunk_bounds(chunk[1])
        count_bytes((high - low) * _SIZE * (replay.step - replay.start.step))
        return finding

    with ThreadPoolExecutor(resources.workers) as pool:
        findings = list(run_tasks(pool, check_chunk, chunks, 2 * resources.workers))
    return list(dict.fromkeys(finding for finding in findings if finding is not None))


def _check_chunk(
    replay: SegmentReplay, stop: SegmentReplay | None, rank: int, index: int, reader: Reader
) -> Finding | None:
    segment = replay.segment
    try:
        states = replay.chunk(rank, index, reader)
        if stop is None or not segment.is_exact:
            return None
        stored = stop.chunk(rank, index, reader)
    except CkptError as error:
        return Finding("replay", error.what, error.where or str(segment.folder))
    for name, values in states.items():
        if name not in stored:
            continue
        unequal = values.view(np.uint32) != stored[name].view(np.uint32)
        if unequal.any():
            first = int(unequal.argmax())
            tensor = next(
                segment.layout.tensors[one.part.tensor].name
                for one in segment.layout.ranks[rank].ranges(index)
                if one.offset <= first < one.offset + one.size
            )
            message = (
                f"step {replay.step}: {name!r} of `{tensor}` differs from what the log gives: "
                f"{int(unequal.sum()):,} of {unequal.size:,} values of a chunk differ"
            )
            return Finding("replay", message, str(segment.folder), (tensor,))
    return None
