"""A segment of the log that grows, and the states of its last complete step in memory: what `ckpt shadow` holds.

The files of all ranks are read on from where the last complete record ended. A step is applied to all chunks when every
rank has it, with the arithmetic of `replay`, so the states are always those of one step. Memory: the states, the
records of a few steps without their gradients, and a chunk of gradients for each thread.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_codecs.optimizers import WEIGHTS
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.core.checkpoint import Checkpoint, Edit, Parameter
from ckpt_formats.core.claims import check_paid
from ckpt_formats.core.errors import CkptError, CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.folders import file_nbytes
from ckpt_formats.core.identity import unrecorded
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.values import Value
from ckpt_formats.universal.gradients.layout import UPDATE
from ckpt_formats.universal.gradients.parts import StatePart
from ckpt_formats.universal.gradients.random_states import without_old_random_states
from ckpt_formats.universal.gradients.record import (
    ENTRY,
    HEAD,
    Kind,
    LogRecord,
    RankLog,
    damage_after,
    hash_values,
    scan_after,
    with_one_nan,
)
from ckpt_formats.universal.gradients.recorded_values import DELTA
from ckpt_formats.universal.gradients.replay import SegmentReplay, StartState, States
from ckpt_formats.universal.gradients.segment import (
    LoggedUpdate,
    Segment,
    count_steps,
    has_own_states,
    is_set,
    open_layout,
    rank_file,
)
from ckpt_formats.universal.gradients.state import Base, checkpoint_of

_RECORDS = 64
"""The number of records of a rank that are read at once."""
_MAX_PENDING = 1 << 20
"""The maximum number of records of one step. A log with more is damaged."""

_OF_VALUES: tuple[tuple[str, Any], ...] = (("changes", []), ("values", {}), ("extras", {}))
"""The fields of a record of values, and what each is if it is left out."""

Options = dict[int, tuple[Mapping[str, Value], ...]]
"""The options of all groups, by optimizer."""


@dataclass(frozen=True)
class Followed(Edit):
    """The checkpoint is the state of a log at the step to which it was followed."""

    folder: Path
    run: str
    step: int


class SegmentTail:
    """The records of a segment that were read and not yet applied, and the facts about its steps that stay.

    Attributes:
        step: The last step that was applied. It begins as that of the layout.
        counts: For each rank, the number of steps that each vector has taken: (vectors,) int64.
        options: The options of all groups after `step`.
        first_updates: The first update of each optimizer up to the step `start`.
    """

    def __init__(self, folder: Path, start: int | None, rank: int | None = None) -> None:
        """Open a segment, to check its records from step `start` on; None: from its first. Raises as `open_segment`.

        `rank`: follow the file of this rank alone, as if it were the only one.
        """
        self.folder = folder
        self.layout, self._heads = open_layout(folder)
        if rank is not None:
            self.layout = replace(self.layout, ranks=(self.layout.ranks[rank],))
            self._heads = (self._heads[rank],)
        self.step = self.layout.first
        self.start = self.layout.first if start is None else start
        self.counts = [np.array([vector.count for vector in rank.vectors], np.int64) for rank in self.layout.ranks]
        self.options: Options = {}
        self.first_updates: dict[int, LoggedUpdate] = {}
        ranks = range(len(self._heads))
        self._logs = [RankLog(folder / rank_file(head.rank), (), 0, 0, None) for head in self._heads]
        self._pending: list[list[LogRecord]] = [[] for _ in ranks]
        self._applied: list[list[LogRecord]] = [[] for _ in ranks]
        self._states: list[list[LogRecord]] = [[] for _ in ranks]
        self._started, self._ended = [False for _ in ranks], [False for _ in ranks]
        self._searched = [(0, 0) for _ in ranks]
        """Where damage was looked for in each file: the end of its complete records, and its size."""

    @property
    def has_start(self) -> bool:
        """Does every rank have the complete state at the start of the segment?"""
        return all(self._started)

    @property
    def has_ended(self) -> bool:
        """Did every rank close its log, and were all complete steps applied?"""
        return all(self._ended) and self.window().last <= self.step

    @property
    def torn(self) -> dict[Path, str]:
        """Why the bytes after the last complete record of a file are not one, by file. Mostly they are to grow."""
        return {log.path: log.torn for log in self._logs if log.torn is not None}

    @property
    def applied_nbytes(self) -> int:
        """The bytes of all files up to the first gradients that were not applied."""
        waiting = ((r.begin - HEAD.size for r in records if r.kind is Kind.GRADIENTS) for records in self._pending)
        return sum(min(begins, default=log.end) for begins, log in zip(waiting, self._logs, strict=True))

    def poll(self, max_steps: int) -> int:
        """Read the records that appeared, of about `max_steps` steps. Returns the last step that all ranks have.

        Raises `CorruptError` if the log is damaged, and `IncompleteError` if a file is missing.
        """
        for rank, head in enumerate(self._heads):
            while sum(1 for _ in self.window().steps(rank)) < max_steps:
                # As many again as there are: else a step of many records is gone through once for a few of them.
                log = scan_after(self._logs[rank], head, self.start, max(_RECORDS, len(self._pending[rank])))
                damaged = None if log.records or log.torn is None else self._logs[rank].damaged
                self._logs[rank] = replace(log, records=(), damaged=damaged)
                if not log.records:
                    self._find_damage(rank)
                    break
                self._pending[rank] += log.records
                if len(self._pending[rank]) > _MAX_PENDING:
                    raise CorruptError(f"step {self.step + 1} has too many records", where=log.path)
        self._keep_other_records()
        return self.window().last

    def damage(self, limit: int | None, *, is_complete: bool) -> CorruptError | None:
        """The error for damaged records after the last ones that were read; None if there are none.

        `limit`: the last step, if the chain states one; `is_complete`: then no file of the segment is to grow.
        """
        if limit is not None and is_complete:
            return replace(self.window(), limit=limit).damage
        return self.window().damage if any(log.damaged is not None for log in self._logs) else None

    def _find_damage(self, rank: int) -> None:
        """Look whether what is after the last complete record is damaged: all of it, once after the file grew."""
        log = self._logs[rank]
        searched = (log.end, file_nbytes(log.path))
        if log.torn is not None and searched != self._searched[rank]:
            damaged = damage_after(log, self._heads[rank], self.step, self._pending[rank])
            self._logs[rank], self._searched[rank] = replace(log, damaged=damaged), searched

    def window(self) -> Segment:
        """The steps after `step` that were read."""
        return self._segment(self.step, self._pending)

    def last_step(self) -> Segment:
        """The step `step` with all its records, and the steps after it that were read."""
        first = self.step - (self.step > self.layout.first)
        return self._segment(first, [_in_order(a + b) for a, b in zip(self._applied, self._pending, strict=True)])

    def stored_states(self) -> Segment:
        """The states that the segment itself stores, without any step."""
        return self._segment(self.layout.first, self._states)

    def fingerprints(self) -> dict[int, frozenset[int]]:
        """The ranks that have a fingerprint that was read and not yet compared, by the step of the fingerprint."""
        ranks: dict[int, set[int]] = {}
        for rank, pending in enumerate(self._pending):
            for record in pending:
                if record.kind is Kind.FINGERPRINT:
                    ranks.setdefault(record.step, set()).add(rank)
        return {step: frozenset(of) for step, of in sorted(ranks.items())}

    @property
    def has_sets(self) -> bool:
        """Has the run set states after `step` that were not applied yet?"""
        return any(is_set(r) and r.step == self.step for pending in self._pending for r in pending)

    def move_to(self, step: int) -> None:
        """Forget the gradients of all steps up to `step`, and all fingerprints of earlier ones."""
        window = self.window()
        for record in (*self._applied[0], *self._pending[0]):
            if record.step <= step:
                self.options |= window.options_in(record)
        for steps in window.updates:
            for number, updates in enumerate(steps[: step - self.step], self.step + 1):
                for update in updates:
                    if number <= self.start:
                        self.first_updates.setdefault(update.optimizer, update)
        self.counts = [self.counts_after(window, rank, step) for rank in range(len(self._heads))]
        if step > self.step:
            self._applied = [[r for r in records if not _is_of_one_step(r)] for records in self._applied]
        self.step = step
        for applied, pending in zip(self._applied, self._pending, strict=True):
            applied += (r for r in pending if r.kind is Kind.GRADIENTS and r.step == step)
            pending[:] = (r for r in pending if r.step > step or r.kind is not Kind.GRADIENTS)
        self._keep_other_records()

    def drop_fingerprints(self) -> None:
        """Forget the fingerprints of the steps up to `step`, which were compared."""
        for pending in self._pending:
            pending[:] = (r for r in pending if r.kind is not Kind.FINGERPRINT or r.step > self.step)

    def drop_sets(self) -> None:
        """Forget the states that the run set up to `step`, which were applied."""
        for pending in self._pending:
            pending[:] = (r for r in pending if not is_set(r) or r.step > self.step)

    def counts_after(self, window: Segment, rank: int, step: int) -> Array:
        """The counts of a rank at a step from `self.step` on: (vectors,) int64."""
        return count_steps(self.layout.ranks[rank], self.counts[rank], window.updates[rank][: step - self.step])

    def _segment(self, first: int, records: Sequence[list[LogRecord]]) -> Segment:
        logs = tuple(replace(log, records=tuple(of)) for log, of in zip(self._logs, records, strict=True))
        return Segment(self.folder, replace(self.layout, first=first), logs, None, self.options)

    def _keep_other_records(self) -> None:
        """Keep the records of applied steps that are no gradients, as far as they are needed."""
        for rank, pending in enumerate(self._pending):
            for record in pending:
                if record.step > self.step or record.kind in (Kind.GRADIENTS, Kind.SKIPPED) or is_set(record):
                    continue
                if record.kind is Kind.VALUES:
                    self._applied[rank].append(record)
                elif record.kind is Kind.STATE:
                    self._states[rank].append(record)
                elif record.kind is Kind.END:
                    self._ended[rank] = True
                elif record.kind is Kind.FINGERPRINT:
                    has_states = has_own_states(self.layout, rank, self._states[rank])
                    self._started[rank] |= has_states and record.step == self.layout.first
                elif record.kind in (Kind.BUFFERS, Kind.RANDOM) or (rank == 0 and record.step == self.step):
                    self._applied[rank].append(record)
            pending[:] = (
                r for r in pending if r.kind is Kind.GRADIENTS or r.step > self.step or _is_pending(r, self.step)
            )
        self._applied = [
            without_old_random_states(_without_old_values(_without_old_buffers(_in_order(records))))
            for records in self._applied
        ]


def _in_order(records: list[LogRecord]) -> list[LogRecord]:
    """Records as they are in the file: one of the next step may come before one of this step."""
    return sorted(records, key=lambda record: record.begin)


def _is_pending(record: LogRecord, step: int) -> bool:
    """Is it needed after the gradients of its step were applied?"""
    is_set_after = is_set(record) and record.meta["set"] == "after"
    return record.step == step and (record.kind is Kind.FINGERPRINT or is_set_after)


def _is_of_one_step(record: LogRecord) -> bool:
    return record.kind not in (Kind.BUFFERS, Kind.VALUES, Kind.RANDOM)


def _without_old_buffers(records: list[LogRecord]) -> list[LogRecord]:
    """Without the records of buffers that later records replace."""
    names = set[str]()
    remaining = []
    for record in reversed(records):
        if record.kind is Kind.BUFFERS:
            rows = record.meta.get("tensors")
            own = {str(row[0]) for row in rows if isinstance(row, list) and row} if isinstance(rows, list) else set()
            if own and own <= names:
                continue
            names |= own
        remaining.append(record)
    return remaining[::-1]


def _without_old_values(records: list[LogRecord]) -> list[LogRecord]:
    """Without the records of values that later records replace. Damaged ones stay: `recorded_values` refuses them."""
    replaced, named = set[int](), set[str]()
    remaining = []
    for record in reversed(records):
        rows = _rows_of(record) if record.kind is Kind.VALUES else None
        if rows is not None:
            changes, names = rows
            if "tensors" not in record.meta and names <= named and all(row in replaced for row, _ in changes):
                continue
            named |= names
            replaced |= {row for row, coding in changes if coding != DELTA}
        remaining.append(record)
    return remaining[::-1]


def _rows_of(record: LogRecord) -> tuple[list[tuple[int, int]], set[str]] | None:
    """The rows of a record of values with their coding, and the names of its values; None if it is damaged."""
    changes, values, extras = (record.meta.get(key, empty) for key, empty in _OF_VALUES)
    if not (isinstance(changes, list) and isinstance(values, dict) and isinstance(extras, dict)):
        return None
    if not all(isinstance(one, list) and len(one) == 2 and all(map(is_natural, one)) for one in changes):
        return None
    return [(row, coding) for row, coding in changes], {*values, *extras}


@dataclass(frozen=True, eq=False)
class _HeldReplay(SegmentReplay):
    """A replay that continues from states in memory."""

    state: "HeldState" = field(kw_only=True)

    @cached_property
    def states_of(self) -> tuple[tuple[str, ...], ...]:
        firsts = {**self.first_updates, **self.state.tail.first_updates}
        return tuple(self.state.names_of(number, firsts.get(number), self) for number in range(len(self.state.names)))

    @cached_property
    def counts_at_end(self) -> list[Array]:
        """For each rank, the counts at `step`."""
        tail = self.state.tail
        return [tail.counts_after(self.segment, rank, self.step) for rank in range(len(self.segment.logs))]

    def counts(self, rank: int, step: int) -> Array:
        tail = self.state.tail
        assert step in (tail.step, self.step)
        return tail.counts[rank] if step == tail.step else self.counts_at_end[rank]

    def chunk(self, rank: int, index: int, reader: Reader) -> States:
        return self.state.chunk(rank, index)

    def prepare(self) -> None:
        """Compute what all chunks need, before threads do so at the same time."""
        self.segment.updates, self.codec, self.fingerprints  # noqa: B018

    def advance_chunk(self, rank: int, index: int, reader: Reader) -> None:
        """Apply all steps to a chunk. Raises `CorruptError`."""
        ranges = list(self.segment.layout.ranks[rank].ranges(index))
        self.advance(rank, index, ranges, self.state.chunk(rank, index), self.segment.first, reader)


@dataclass(frozen=True, eq=False)
class _StartReplay(SegmentReplay):
    """The states at the start of a replay."""

    names: tuple[tuple[str, ...], ...] = field(kw_only=True)
    counts_at_start: Sequence[Array] = field(kw_only=True)

    @cached_property
    def states_of(self) -> tuple[tuple[str, ...], ...]:
        return self.names

    def counts(self, rank: int, step: int) -> Array:
        return self.counts_at_start[rank]

    def start_of(self, rank: int, index: int, reader: Reader) -> States:
        """A chunk of all states at the start. Raises `CorruptError` or `IncompleteError`."""
        layout = self.segment.layout.ranks[rank]
        low, high = layout.chunk_bounds(index)
        return self._start(rank, index, list(layout.ranges(index)), high - low, reader)


class HeldState:
    """All states of a segment in memory, at one step. Threads must not share one.

    Attributes:
        tail: The segment.
        base: The state from which it is followed; None: the one that the segment itself stores.
        names: For each optimizer, the names of the states that it changes, the weights first.
        verified: The last step at which all states had the hashes that the run recorded.
        part: What is held; None: the whole state.
    """

    def __init__(self, folder: Path, base: Base | None, part: StatePart | None = None, rank: int | None = None) -> None:
        """Open a segment, and read nothing else. Raises as `open_segment`.

        `part`: hold no more than that in memory. `rank`: hold the states of this rank alone.
        """
        self.base = base
        self.part = part
        self.tail = SegmentTail(folder, None if base is None else base.step, rank)
        self.names: tuple[tuple[str, ...], ...] = ()
        self.verified: int | None = None
        layout = self.tail.layout
        self._arrays: list[dict[str, Array]] = [{} for _ in layout.ranks]
        self._stepped = set[int]()
        self._compared = frozenset[int]()
        """The ranks whose fingerprint of this step was compared."""
        self._counts_at_start: list[Array] = []
        self._error: CkptError | None = None
        self._chunks: list[tuple[int, int]] = []
        self._places: list[dict[int, slice]] = [{} for _ in layout.ranks]
        self._sizes = [0 for _ in layout.ranks]

    @property
    def step(self) -> int:
        return self.tail.step

    @property
    def is_loaded(self) -> bool:
        return bool(self.names)

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(array.nbytes for arrays in self._arrays for array in arrays.values())

    @property
    def numel(self) -> int:
        """The number of elements that each step changes."""
        return sum(self._sizes)

    def chunk(self, rank: int, index: int) -> States:
        """A chunk of all states: views, which change with the next step."""
        place = self._places[rank][index]
        return {name: array[place] for name, array in self._arrays[rank].items()}

    def find_start(self, max_steps: int) -> bool:
        """Read the log up to the base, about `max_steps` steps at once. Is the start of the replay complete there?"""
        tail = self.tail
        while (last := tail.poll(max_steps)) > tail.step and tail.step < tail.start:
            tail.move_to(min(last, tail.start))
        return tail.step == tail.start and (self.base is not None or tail.has_start)

    def load(self, workers: int) -> None:
        """Read the states at the start, after `find_start`. Raises `CkptError`."""
        tail = self.tail
        self._check_size()
        self._place_chunks()
        self._counts_at_start = tail.counts
        names = tuple(self._names_at_start(number) for number in range(len(tail.layout.optimizers)))
        self._load(names, workers)
        self.names = names

    def advance(self, step: int, workers: int) -> None:
        """Apply all steps up to `step`, which all ranks have, and compare with all fingerprints on the way.

        Raises `CkptError`; then there is no valid state any more, and each later call raises the error again.
        """
        self._raise_error()
        tail = self.tail
        ranks = {number: of for number, of in tail.fingerprints().items() if tail.step <= number <= step}
        compared = list(ranks)
        if step == tail.step and not compared and not tail.has_sets:
            return
        ranks[tail.step] = ranks.get(tail.step, frozenset()) | self._compared  # others may have come before
        verified = [number for number in compared if len(ranks[number]) == len(tail.layout.ranks)]
        self._error = CorruptError("a step was interrupted", where=tail.folder)
        try:
            self._add_names(step, workers)
            replay = self._replay(tail.window(), step)
            replay.prepare()
            self._for_each_chunk(replay.advance_chunk, workers)
        except CkptError as error:
            self._error = error
            raise
        self._error = None
        tail.move_to(step)
        tail.drop_fingerprints()
        tail.drop_sets()
        self._compared = ranks.get(step, frozenset())
        self.verified = max(verified, default=self.verified)

    def checkpoint(self) -> Checkpoint:
        """The states of the last step as a checkpoint: the same as that of `state.checkpoint_at`.

        It must not be read any more when the next step is applied. Of a part, only what is in it can be read.
        """
        self._raise_error()
        if self.base is not None and self.step == self.base.step:
            return self.base.checkpoint
        source = None if self.base is None else self.base.checkpoint
        with unrecorded():  # the log grows
            checkpoint = checkpoint_of(self._replay(self.tail.last_step(), self.step), source)
        history = (Followed(self.tail.folder, self.tail.layout.run, self.step),)
        return replace(checkpoint, identities={} if source is None else source.identities, history=history)

    def rebase(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint with the states of the last step as the base from now on."""
        self.base, self.tail.start = Base(self.step, checkpoint), self.step
        self._counts_at_start = self.tail.counts

    def check_equal(self, parameters: Mapping[str, Parameter], workers: int) -> None:
        """Raise `CorruptError` unless the states of a checkpoint have the same bits as these."""
        tail = self.tail
        start = StartState(tail.step, parameters)
        other = _StartReplay(tail.stored_states(), tail.step, start, names=self.names, counts_at_start=tail.counts)

        def compare(rank: int, index: int, reader: Reader) -> None:
            states = other.start_of(rank, index, reader)
            for name, values in self.chunk(rank, index).items():
                if hash_values(with_one_nan(values)) != hash_values(with_one_nan(states[name])):
                    raise CorruptError(f"{name!r} of chunk {index} of rank {rank} differs from the state in memory")

        self._for_each_chunk(compare, workers)

    def names_of(self, optimizer: int, first: LoggedUpdate | None, replay: SegmentReplay) -> tuple[str, ...]:
        """The names of the states of an optimizer. `first`: an update of it, if there is one."""
        names = self.names[optimizer]
        if optimizer in self._stepped or first is None or not names:
            return names
        stepped = _stepped_names(replay, first)
        return tuple(name for name in names if name == WEIGHTS or name in stepped)

    def _replay(self, segment: Segment, step: int) -> _HeldReplay:
        return _HeldReplay(segment, step, StartState(self.tail.start, None), state=self)

    def _check_size(self) -> None:
        """Raise `CorruptError` unless files describe as many elements as the layout claims: those of the log, or of
        the base."""
        segment = self.tail.stored_states()
        if self.base is not None:
            replay = SegmentReplay(segment, self.base.step, StartState(self.base.step, self.base.checkpoint.parameters))
            for number in range(len(segment.layout.tensors)):
                replay.parameter(number)
            return
        for rank, layout in enumerate(segment.layout.ranks):
            for record in segment.records(rank, Kind.STATE):
                nbytes = record.count * ENTRY.itemsize
                check_paid("chunks", layout.chunk_count, ENTRY.itemsize, nbytes, segment.path(rank))

    def _place_chunks(self) -> None:
        layout = self.tail.layout
        whole = ((rank, index) for rank, one in enumerate(layout.ranks) for index in range(one.chunk_count))
        self._chunks = list(whole) if self.part is None else self.part.chunks(layout)
        for rank, index in self._chunks:
            low, high = layout.ranks[rank].chunk_bounds(index)
            begin = self._sizes[rank]
            self._places[rank][index] = slice(begin, begin + high - low)
            self._sizes[rank] = begin + high - low

    def _names_at_start(self, optimizer: int) -> tuple[str, ...]:
        segment = self.tail.stored_states()
        if segment.layout.optimizers[optimizer].method == UPDATE:
            return ()
        names = [str(record.meta.get("state")) for record in segment.records(0, Kind.STATE)]
        first = self.tail.first_updates.get(optimizer)
        if first is not None:
            stepped = _stepped_names(SegmentReplay(segment, self.step, StartState(self.step, None)), first)
            names = [name for name in names if name in stepped]
        return tuple(dict.fromkeys([WEIGHTS, *names]))

    def _add_names(self, step: int, workers: int) -> None:
        """Read the states of optimizers that step for the first time now."""
        window = self.tail.window()
        replay = SegmentReplay(window, step, StartState(self.step, None))
        names, missing = list(self.names), [tuple[str, ...]()] * len(self.names)
        for updates in (updates for steps in window.updates for updates in steps[: step - self.step]):
            for update in updates:
                number = update.optimizer
                if number not in self._stepped and self.tail.layout.optimizers[number].method != UPDATE:
                    names[number] = tuple(dict.fromkeys([WEIGHTS, *_stepped_names(replay, update)]))
                    missing[number] = tuple(name for name in names[number] if name not in self.names[number])
                    self._stepped.add(number)
        if any(missing):
            self._load(tuple(missing), workers)
        self.names = tuple(names)
        remaining = {name for one in names for name in one}
        self._arrays = [{name: of[name] for name in of if name in remaining} for of in self._arrays]

    def _load(self, names: tuple[tuple[str, ...], ...], workers: int) -> None:
        """Read these states at the start, for each optimizer by their names."""
        tail = self.tail
        for arrays, size in zip(self._arrays, self._sizes, strict=True):
            for name in dict.fromkeys(name for one in names for name in one):
                arrays.setdefault(name, np.zeros(size, np.float32))
        start = StartState(tail.start, None if self.base is None else self.base.checkpoint.parameters)
        counts = self._counts_at_start
        replay = _StartReplay(tail.stored_states(), tail.start, start, names=names, counts_at_start=counts)

        def load_chunk(rank: int, index: int, reader: Reader) -> None:
            layout = tail.layout.ranks[rank]
            states, begin = replay.start_of(rank, index, reader), self._places[rank][index].start
            for one in layout.ranges(index):
                for name in names[layout.vectors[one.part.vector].optimizer]:
                    target = self._arrays[rank][name][begin + one.offset : begin + one.offset + one.size]
                    target[:] = states[name][one.offset : one.offset + one.size]

        self._for_each_chunk(load_chunk, workers)

    def _for_each_chunk(self, work: Callable[[int, int, Reader], None], workers: int) -> None:
        """Call `work` for each chunk, in threads. Raises the first error of a call; then no further call begins."""
        chunks = deque(self._chunks)

        def run() -> None:
            with Reader(check=False) as reader:
                while True:
                    try:
                        rank, index = chunks.popleft()
                    except IndexError:
                        return
                    try:
                        work(rank, index, reader)
                    except BaseException:
                        chunks.clear()
                        raise

        if workers == 1 or len(chunks) == 1:
            run()
            return
        with ThreadPoolExecutor(workers) as pool:
            for task in [pool.submit(run) for _ in range(min(workers, len(chunks)))]:
                task.result()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _stepped_names(replay: SegmentReplay, update: LoggedUpdate) -> list[str]:
    """The names of the states that a call of an optimizer changes."""
    return [name for group in range(len(update.groups)) for name in replay.step_of(update, group).states]
