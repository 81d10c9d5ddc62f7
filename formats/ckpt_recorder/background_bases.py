"""Bases that do not stop training: a thread copies pieces of the state while the next forward and backward pass run.

A piece is some chunks of this rank's vector, all states of them. `rolling` copies a few pieces after each step, each at
its own step; `at once` all of one step. The next update waits for the pieces that it would change. The thread hands
each piece to a process, `base_process`, which makes the base: see there and in `base_folding`.

Memory: the ring, and nothing else. The thread waits while the ring is full.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt_formats.universal.gradients.layout import RankLayout
from ckpt_recorder.base_pieces import BaseSettings, folder_name, give_up
from ckpt_recorder.orders import BeginBase, FinishBase, WritePiece
from ckpt_training import copies
from ckpt_training.engines.run import TrackedRun, state_names, state_of
from ckpt_training.writing.link import WriterLink
from ckpt_training.writing.ring import Ring

MODULE = "ckpt_recorder.base_process"
"""The module that the process runs."""
_SLOTS = 4
_END_SECONDS = 600.0
_ITEM = 4
"""Bytes of a value."""


@dataclass(frozen=True)
class CopiedRange:
    """Elements of a tracked tensor that a piece has: they follow each other in both."""

    tensor: int
    start: int
    """The index in the tensor, flattened."""
    target: int
    """The index in the piece, counted from its first element of a state."""
    size: int


@dataclass(frozen=True)
class PlannedPiece:
    """Chunks of the rank's vector that are copied together."""

    chunks: tuple[int, ...]
    size: int
    """The number of elements of each state."""
    ranges: tuple[CopiedRange, ...]

    @property
    def tensors(self) -> frozenset[int]:
        return frozenset(one.tensor for one in self.ranges)


def plan_pieces(
    layout: RankLayout, offsets: Sequence[tuple[int, int]], max_size: int, steps: int
) -> list[list[PlannedPiece]]:
    """The pieces of each step, in the order of the tensors.

    A step has the chunks that begin in its share of the rank's elements, so at most that share and a chunk more.

    Args:
        layout: The rank's vector.
        offsets: For each part of it, the number of the tracked tensor and the index of its first element there.
        max_size: The maximum number of elements of a state in a piece; at least those of a chunk.
        steps: The number of steps.
    """
    places = dict(zip(map(id, layout.parts), offsets, strict=True))
    order = sorted(range(layout.chunk_count), key=lambda index: min(_tensors(layout, index, places)))
    groups: list[list[list[int]]] = [[] for _ in range(steps)]
    begin = 0
    for chunk in order:
        low, high = layout.chunk_bounds(chunk)
        of_step = groups[steps * begin // layout.size]
        if of_step and sum(_size(layout, one) for one in of_step[-1]) + high - low <= max_size:
            of_step[-1].append(chunk)
        else:
            of_step.append([chunk])
        begin += high - low
    return [[_planned(layout, group, places) for group in of_step] for of_step in groups]


def _size(layout: RankLayout, chunk: int) -> int:
    low, high = layout.chunk_bounds(chunk)
    return high - low


def _tensors(layout: RankLayout, chunk: int, places: dict[int, tuple[int, int]]) -> Iterable[int]:
    return (places[id(one.part)][0] for one in layout.ranges(chunk))


def _planned(layout: RankLayout, chunks: Sequence[int], places: dict[int, tuple[int, int]]) -> PlannedPiece:
    ranges, at = list[CopiedRange](), 0
    for chunk in chunks:
        for one in layout.ranges(chunk):
            tensor, offset = places[id(one.part)]
            new = CopiedRange(tensor, offset + one.start, at, one.size)
            last = ranges[-1] if ranges else None
            if last is not None and last.tensor == tensor and last.start + last.size == new.start:
                ranges[-1] = CopiedRange(tensor, last.start, last.target, last.size + one.size)
            else:
                ranges.append(new)
            at += one.size
    return PlannedPiece(tuple(chunks), at, tuple(ranges))


@dataclass(eq=False)
class CopiedPiece:
    """A piece of one step, on its way."""

    plan: PlannedPiece
    step: int
    after: Any
    """The point in the work of the device at which the state of the step is complete."""
    done: threading.Event = field(default_factory=threading.Event)
    started: bool = False
    """Does the thread copy it, or did it?"""
    staged: dict[tuple[CopiedRange, str], torch.Tensor] | None = None
    """Copies on the device of the values that it needs."""


class BackgroundBases:
    """The bases of one rank in one segment. Its methods are for the thread of the training only.

    Attributes:
        waited: Seconds for which updates have waited for pieces of the last base, or of the current one.
        stored: The step of the last base that was stored, known on rank 0 only; None if there was none.
        nbytes: The bytes of the ring.
        problems: What the user has not been told yet: which bases were not stored, and why.
        failure: Why there can be no more bases; None if there can.
    """

    def __init__(
        self,
        run: TrackedRun,
        layout: RankLayout,
        offsets: Sequence[tuple[int, int]],
        settings: Callable[[int, int], BaseSettings],
        run_name: str,
        steps: int,
        memory: int,
    ) -> None:
        """Start the process, in the background.

        Args:
            run: The run, after a step, so that its optimizer has all states.
            layout: The rank's vector.
            offsets: For each part of it, the number of the tracked tensor and the index of its first element there.
            settings: Gives the settings of the process from the size of a slot and their number.
            run_name: The name of the run in the layout of the segment.
            steps: The number of steps over which a base is spread; 1: all pieces are of one step.
            memory: The maximum bytes of the ring, if it has room for four chunks of all states.
        """
        self._run, self._layout, self.names = run, layout, tuple(state_names(run))
        device = next((one.tensor.device for one in run.tensors), torch.device("cpu"))
        self._copies = copies.copies_of(device)
        chunk_size = max((high - low for low, high in map(layout.chunk_bounds, range(layout.chunk_count))), default=1)
        each = len(self.names) * _ITEM
        wanted = -(-layout.size // (_SLOTS if steps == 1 else 2 * steps))
        size = max(chunk_size, min(memory // (_SLOTS * each), wanted))
        self._plan = plan_pieces(layout, offsets, size, steps)
        self._ring = Ring(size * each, _SLOTS)
        self.nbytes = self._ring.slot_nbytes * _SLOTS
        self._settings, self._run_name, self._folder = settings(size * each, _SLOTS), run_name, ""
        self._todo: deque[list[PlannedPiece]] = deque()
        self._pending: list[CopiedPiece] = []
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Callable[[WriterLink], None] | None] = queue.SimpleQueue()
        self._is_ready, self._is_dropped = threading.Event(), False
        self.failure: str | None = None
        self.problems: deque[str] = deque()
        self.stored: int | None = None
        self.waited = 0.0
        self._current: int | None = None
        """The step after which the base in progress began."""
        self.pid: int | None = None
        self._link: WriterLink | None = None
        """Only the thread uses it, but for the question whether its process lives."""
        self._thread = threading.Thread(target=self._work, name="ckpt-bases", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Can a base begin now?"""
        return self._is_ready.is_set() and not self.has_failed

    @property
    def has_failed(self) -> bool:
        """Is there no process any more that could make a base?"""
        return self.failure is not None or (self._link is not None and not self._link.is_alive)

    def has_room(self) -> bool:
        """Has the optimizer the states that it had? The ring has room for no others."""
        return tuple(state_names(self._run)) == self.names

    @property
    def is_copying(self) -> bool:
        """Are there pieces for which an update may have to wait?"""
        return any(not piece.done.is_set() and piece.staged is None for piece in self._pending)

    def begin(self, step: int) -> None:
        """Begin a base after a step. `copy_next` must follow."""
        self.waited, self._current = 0.0, step
        self._folder = folder_name(step, self._run_name)
        self._todo.extend(self._plan)
        self._is_ready.clear()
        self._orders.put(lambda link: link.order(BeginBase(step)))

    def copy_next(self, step: int) -> None:
        """Copy the pieces that are due after a step, in the background."""
        if not self._todo:
            return
        self._pending = [CopiedPiece(plan, step, self._copies.mark()) for plan in self._todo.popleft()]
        for piece in self._pending:
            self._orders.put(lambda link, piece=piece: self._copy(link, piece))  # type: ignore[misc]
        if not self._todo:
            self._orders.put(lambda link: self._finish(link, step))

    def wait(self, tensors: frozenset[int]) -> float:
        """Wait until these tensors may change. Returns the seconds.

        Pieces whose copy has not begun are staged on the device, the last ones first, as far as there is memory.
        """
        late = [
            piece
            for piece in self._pending
            if not piece.done.is_set() and piece.staged is None and piece.plan.tensors & tensors
        ]
        if not late or self.failure is not None:
            return 0.0
        begin = time.monotonic()
        free = self._copies.free_nbytes()
        for piece in reversed(late):
            nbytes = piece.plan.size * len(self.names) * _ITEM
            if nbytes <= free and self._stage(piece):
                free -= nbytes
        for piece in late:
            if piece.staged is None:
                piece.done.wait()
        seconds = time.monotonic() - begin
        self.waited += seconds
        return seconds

    def drop(self) -> None:
        """Give up the base, unless all its pieces were copied. Afterwards the state may change."""
        with self._lock:
            if self._todo or not all(piece.done.is_set() for piece in self._pending):
                self._is_dropped = True
        self._todo.clear()
        for piece in self._pending:
            if piece.started and piece.staged is None:
                piece.done.wait()

    def close(self, wait: bool) -> None:
        """End the process. A base whose pieces were all ordered is stored first; with `wait`, wait for that."""
        if self._todo:
            self.drop()
        self._orders.put(None)
        if wait:
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                self.problems.append(f"the base that began after step {self._current} is still being made")

    def _stage(self, piece: CopiedPiece) -> bool:
        """Copy a piece on its device, unless the thread copies it already."""
        with self._lock:
            if piece.started:
                return False
            keys = [(one, name) for name in self.names for one in piece.plan.ranges]
            sources = [(key, source) for key in keys if (source := self._source(*key)) is not None]
            copies, piece.after = self._copies.stage([source for _, source in sources])
            piece.staged = {key: copy for (key, _), copy in zip(sources, copies, strict=True)}
        return True

    def _source(self, one: CopiedRange, name: str) -> torch.Tensor | None:
        """The values of a range of a tensor, (n,) on its device; None if it has no such state yet."""
        values = state_of(self._run, one.tensor, name)
        return None if values is None else values[one.start : one.start + one.size]

    def _work(self) -> None:
        """The thread: execute orders until there are no more."""
        link = None
        try:
            self._copies.pin(self._ring.content)
            link = self._link = WriterLink(self._settings, self._ring, self._settings.seconds, MODULE, "bases")
            self.pid = link.pid
            self._is_ready.set()
            while (order := self._orders.get()) is not None:
                order(link)
        except Exception as error:
            if self._current is not None:
                give_up(Path(self._settings.chain) / self._folder, self._settings.rank)
            self.failure = str(error) or type(error).__name__
            base = "bases are" if self._current is None else f"the base that began after step {self._current} is"
            self.problems.append(f"{base} not stored: {self.failure}")
            with self._lock:
                self._is_dropped = True
            for piece in self._pending:
                piece.done.set()
        if link is not None:
            link.close()

    def _copy(self, link: WriterLink, piece: CopiedPiece) -> None:
        """Copy a piece into the ring, and order it to be written."""
        slot = link.acquire_slot() if not self._is_dropped else 0
        with self._lock:
            if self._is_dropped:
                piece.done.set()
                return
            piece.started, staged = True, piece.staged
        size, chunks = piece.plan.size, list(piece.plan.chunks)
        values = self._ring.slot(slot)[: len(self.names) * size * _ITEM].view(np.float32).reshape(-1, size)
        targets, sources = [], []
        for row, name in zip(values, self.names, strict=True):
            for one in piece.plan.ranges:
                source = self._source(one, name) if staged is None else staged.get((one, name))
                target = row[one.target : one.target + one.size]
                if source is None:
                    target.fill(0)
                else:
                    targets.append(target)
                    sources.append(source)
        self._copies.copy(targets, sources, piece.after)
        piece.staged = None if staged is None else {}  # the memory is free again
        piece.done.set()
        link.order(WritePiece(slot, piece.step, chunks, list(self.names)))

    def _finish(self, link: WriterLink, step: int) -> None:
        """Order the base to be made of its pieces, and wait for the result."""
        if self._is_dropped:
            return
        link.order(FinishBase(step))
        word, rest = link.next_message()
        if word == "stored":
            self.stored = step
        else:
            self.problems.append(f"the base of step {step} is not stored: {rest}")
        self._current = None
        self._is_ready.set()
