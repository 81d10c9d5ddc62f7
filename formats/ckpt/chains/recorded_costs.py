"""What a plan needs to know of a recorded run and its chain has: bytes, parameters, and how fast its steps replay here.

The log states no times: the time of a step, stalls and the write rate must come from the user.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt.chains.segments import open_segments, steps_nbytes
from ckpt_formats.core.errors import NotFoundError
from ckpt_formats.core.files import Reader
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.members import member_at, open_member
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.segment import Segment
from ckpt_formats.universal.gradients.state import Base, replay_to

_MAX_STEPS = 64
"""Steps that are replayed to measure the rate."""


@dataclass(frozen=True)
class RecordedCosts:
    """What the last readable segment of a chain and its states state."""

    folder: str
    """The segment."""
    steps: int
    """The number of steps in it."""
    parameters: int
    """The number of elements that the optimizers step."""
    step_nbytes: float
    """The mean bytes of gradients that a step adds, of all ranks."""
    base_nbytes: int
    """The stored bytes of the chain's last base; without one, of the state at the start of the segment."""
    exactness: tuple[str, ...]
    """How exact the replay of each optimizer is."""
    replay_rate: float | None
    """Parameters a second that one thread replays here, with reading and decoding; None: not measured."""


def recorded_costs(
    run: Path, measured_seconds: float = 0.0, clock: Callable[[], float] = time.perf_counter
) -> RecordedCosts:
    """The costs that a chain states.

    Args:
        run: The folder of the chain.
        measured_seconds: How long steps are replayed here, to measure the rate; 0: not at all.
        clock: Gives seconds.

    Raises:
        NotFoundError: The chain has no recorded step.
        CkptError: It cannot be read.
    """
    chain = chain_file.read(run)
    segments = [view.segment for view in open_segments(run, chain) if view.segment is not None]
    segments = [segment for segment in segments if segment.last > segment.first]
    if not segments:
        raise NotFoundError(
            "the chain has no recorded step",
            where=run,
            hint="Record some steps first (docs/recording.md), or give all figures as options and no chain.",
        )
    segment = segments[-1]
    rate = None
    if measured_seconds > 0:
        base = None
        if segment.layout.parent is not None:
            base = Base(segment.first, open_member(run, chain, member_at(run, chain, segment.first)))
        rate = _replay_rate(segment, base, measured_seconds, clock)
    steps, layout = segment.last - segment.first, segment.layout
    bases = [member.stored_nbytes for member in chain.members if member.parent is None]
    return RecordedCosts(
        *(segment.folder.name, steps, layout.numel, steps_nbytes(segment) / steps),
        bases[-1] if bases else _start_nbytes(segment),
        tuple(one.exactness for one in layout.optimizers),
        rate,
    )


def _start_nbytes(segment: Segment) -> int:
    """The bytes of the state that a segment stores at its start; if it names one, 12 for each parameter."""
    stored = sum(record.nbytes for rank in range(len(segment.logs)) for record in segment.records(rank, Kind.STATE))
    return stored or 12 * segment.layout.numel


def _replay_rate(segment: Segment, base: Base | None, seconds: float, clock: Callable[[], float]) -> float:
    """Elements a second that one thread replays, with reading and decoding.

    Chunks are replayed for `seconds`, or until none is left. The time to read the state at the start does not count.
    """
    first, step = segment.first, min(segment.last, segment.first + _MAX_STEPS)
    chunks = [(rank, number) for rank, one in enumerate(segment.layout.ranks) for number in range(one.chunk_count)]
    if not chunks:
        raise NotFoundError("the log has no parameters whose steps could be replayed", where=segment.folder)
    with Reader(check=False) as reader:
        replay_to(segment, step, base).chunk(*chunks[0], reader)  # loads the kernels
        begin, elements, spent = clock(), 0, 0.0
        for rank, number in chunks:
            starting = clock()
            replay_to(segment, first, base).chunk(rank, number, reader)
            before = clock()
            replay_to(segment, step, base).chunk(rank, number, reader)
            end = clock()
            spent += (end - before) - (before - starting)
            low, high = segment.layout.ranks[rank].chunk_bounds(number)
            elements += (high - low) * (step - first)
            if end - begin >= seconds:
                break
    return elements / max(spent, 1e-9)
