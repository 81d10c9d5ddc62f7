"""The replay of a segment: states at any step, from the states at its start and the logged gradients.

A chunk of all states goes through all steps while it is in memory. So a state of any size takes the memory of a few
chunks, and each stored byte is read once. Threads share computed chunks.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ckpt_codecs import Codec, CodecError
from ckpt_codecs.gradients import gradient_codec
from ckpt_codecs.optimizers import WEIGHTS, OptimizerStep
from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, flat_boxes, flat_ends
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import Array, Blob, FileBlob, FlatRangeBlob
from ckpt_formats.core.text import list_names
from ckpt_formats.universal.chunked import read_chunks
from ckpt_formats.universal.gradients.layout import CHUNK, UPDATE, ChunkRange, LoggedTensor, OptimizerVector, VectorPart
from ckpt_formats.universal.gradients.optimizers import step_of as group_step
from ckpt_formats.universal.gradients.record import MAX_CHUNK_OVERHEAD, Kind, LogRecord, hash_values, with_one_nan
from ckpt_formats.universal.gradients.segment import LoggedUpdate, Segment, count_steps, is_set
from ckpt_formats.universal.replay import Place

FLOAT32 = DTYPES["float32"]
_MAX_CACHED = 64 << 20
"""The maximum size of cached chunks in bytes."""

_TURNS = 4
"""The number of chunks that stay in the cache whatever their size: threads read parts of them in turns."""
States = dict[str, Array]
"""A chunk of every state, by name: each (n,) float32."""


@dataclass(frozen=True)
class StartState:
    """The state from which steps are replayed."""

    step: int
    parameters: Mapping[str, Parameter] | None
    """None: the states that the segment itself stores."""


@dataclass(frozen=True, eq=False)
class SegmentReplay:
    """The state at one step of a segment."""

    segment: Segment
    step: int
    start: StartState
    _cache: "_Cache" = field(default_factory=lambda: _Cache(_MAX_CACHED))

    @cached_property
    def codec(self) -> Codec:
        """The codec of the gradients. Raises `UnsupportedError` if it is unknown."""
        try:
            return gradient_codec(self.segment.layout.codec)
        except CodecError as error:
            raise UnsupportedError(str(error), where=self.segment.folder) from None

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The names of all states that change in steps, the weights first."""
        return tuple(dict.fromkeys([WEIGHTS, *(name for names in self.states_of for name in names)]))

    @cached_property
    def states_of(self) -> tuple[tuple[str, ...], ...]:
        """For each optimizer, the names of the states that it changes, the weights first."""
        recorded = [str(record.meta.get("state")) for record in self.segment.records(0, Kind.STATE)]
        optimizers = enumerate(self.segment.layout.optimizers)
        return tuple(() if one.method == UPDATE else self._names(number, recorded) for number, one in optimizers)

    def _names(self, optimizer: int, recorded: list[str]) -> tuple[str, ...]:
        first = self.first_updates.get(optimizer)
        if first is None:
            return tuple(dict.fromkeys([WEIGHTS, *recorded]))
        stepped = [name for group in range(len(first.groups)) for name in self.step_of(first, group).states]
        if self.start.step < first.record.step <= self.step:
            return tuple(dict.fromkeys([WEIGHTS, *stepped]))
        return tuple(dict.fromkeys([WEIGHTS, *(name for name in recorded if name in stepped)]))

    @cached_property
    def first_updates(self) -> dict[int, LoggedUpdate]:
        """For each optimizer, an update that shows its states' names: the first replayed one, else the first one."""
        firsts: dict[int, LoggedUpdate] = {}
        for steps in self.segment.updates:
            for updates in steps:
                for update in updates:
                    known = firsts.get(update.optimizer)
                    if known is None or known.record.step <= self.start.step < update.record.step:
                        firsts[update.optimizer] = update
        return firsts

    def counts(self, rank: int, step: int) -> Array:
        """The number of steps that each vector of a rank has taken at a step: (vectors,) int64."""
        if (rank, step) not in self._counts:
            layout = self.segment.layout.ranks[rank]
            before = np.array([vector.count for vector in layout.vectors], np.int64)
            steps = self.segment.updates[rank][: step - self.segment.first]
            self._counts[rank, step] = count_steps(layout, before, steps)
        return self._counts[rank, step]

    @cached_property
    def _counts(self) -> dict[tuple[int, int], Array]:
        """Of the two steps that are needed: where the replay starts, and where it ends."""
        return {}

    def chunk(self, rank: int, index: int, reader: Reader) -> States:
        """A chunk of all states of a rank, which the caller must not change. Raises `CorruptError`."""
        return self._cache.get((rank, index), lambda: self._replay(rank, index, reader))

    def _replay(self, rank: int, index: int, reader: Reader) -> States:
        layout = self.segment.layout.ranks[rank]
        ranges = list(layout.ranges(index))
        begin, end = layout.chunk_bounds(index)
        states = self._start(rank, index, ranges, end - begin, reader)
        self.advance(rank, index, ranges, states, self.start.step, reader)
        return states

    def advance(
        self, rank: int, index: int, ranges: list[ChunkRange], states: States, step: int, reader: Reader
    ) -> None:
        """Apply all steps after `step` to a chunk, in place. It is compared with each fingerprint of these steps.

        What the run set after `step` is applied first; it does no harm if `states` have it already.

        `states`: those of `step`, which has its own fingerprint. Raises `CorruptError`; then `states` are not valid.
        """
        sets = self.segment.sets[rank]
        self._complete_step(rank, index, step, states, ranges, reader)
        gradients = np.empty(len(next(iter(states.values()))), np.float32)
        counts = _ChunkCounts(self.counts(rank, step), self.segment.layout.ranks[rank].vectors, ranges)
        for number in range(step + 1, self.step + 1):
            for record in sets.get((number, False), ()):
                self._set(record, rank, index, states, reader)
            updates = self.segment.updates[rank][number - 1 - self.segment.first]
            counts.add(updates)
            for update in updates:
                if self._decode(update.record, rank, index, gradients, reader):
                    self._apply(update, rank, counts, ranges, states, gradients)
            self._complete_step(rank, index, number, states, ranges, reader)

    def _complete_step(
        self, rank: int, index: int, step: int, states: States, ranges: list[ChunkRange], reader: Reader
    ) -> None:
        """Complete a chunk of a step: apply what the run set after it, and compare it with the step's fingerprint."""
        fingerprint = self.fingerprints.get((rank, step))
        for record in self.segment.sets[rank].get((step, True), ()):
            if fingerprint is not None and fingerprint.begin < record.begin:
                self._verify(rank, index, step, states, ranges)
                fingerprint = None
            self._set(record, rank, index, states, reader)
        if fingerprint is not None:
            self._verify(rank, index, step, states, ranges)

    def _set(self, record: LogRecord, rank: int, index: int, states: States, reader: Reader) -> None:
        name = str(record.meta.get("state"))
        if name in states:
            self._decode(record, rank, index, states[name], reader)

    def _apply(
        self,
        update: LoggedUpdate,
        rank: int,
        counts: "_ChunkCounts",
        ranges: list[ChunkRange],
        states: States,
        gradients: Array,
    ) -> None:
        """Apply one call of an optimizer. Adjacent ranges with equal group and count are stepped together."""
        vectors = self.segment.layout.ranks[rank].vectors
        tensors, is_whole = (
            self.segment.layout.tensors,
            self.segment.layout.optimizers[update.optimizer].threads is not None,
        )
        runs = _runs(update, ranges, vectors, tensors, counts, is_whole)
        for (group, dtype, count, shape), vectorized, start, stop in runs:
            step = self.step_of(update, group, dtype)
            selected = {name: states[name][start:stop].reshape(shape) for name in step.states}
            try:
                step.apply(selected, gradients[start:stop].reshape(shape), count, vectorized)
            except (CodecError, ArithmeticError) as error:
                raise CorruptError(f"step {update.record.step}: {error}", where=self.segment.path(rank)) from None

    def step_of(self, update: LoggedUpdate, group: int, dtype: str = "float32") -> OptimizerStep:
        """The step of an update for values of one of its groups. Raises `UnsupportedError` or `CorruptError`."""
        # Records with the same options share one list (`record.scan`), which exists as long as the segment.
        key = (update.optimizer, id(update.record.meta["groups"]), group, dtype)
        if key not in self._steps:
            optimizer = self.segment.layout.optimizers[update.optimizer]
            self._steps[key] = group_step(optimizer, update.groups[group], self.segment.folder, dtype)
        return self._steps[key]

    @cached_property
    def _steps(self) -> dict[tuple[int, int, int, str], OptimizerStep]:
        return {}

    def _start(self, rank: int, index: int, ranges: list[ChunkRange], size: int, reader: Reader) -> States:
        states = {name: np.zeros(size, np.float32) for name in self.states}
        if self.start.parameters is None:
            for record in self.segment.records(rank, Kind.STATE):
                name = str(record.meta.get("state"))
                if name in states and not is_set(record):
                    self._decode(record, rank, index, states[name], reader)
            return states
        for one in ranges:
            parameter = self.parameter(one.part.tensor)
            optimizer = self.segment.layout.ranks[rank].vectors[one.part.vector].optimizer
            dtype = self.segment.layout.tensors[one.part.tensor].stepped
            for name, blob in _start_blobs(parameter, self.states_of[optimizer], dtype).items():
                if blob is None:
                    self._check_fresh(rank, one.part, name, parameter)
                    continue
                target = states[name][one.offset : one.offset + one.size]
                low = one.part.start + one.start
                values = np.empty(one.size, blob.dtype) if blob.dtype != FLOAT32 else target
                FlatRangeBlob(blob.crop(one.part.box), low, low + one.size).read_into(values, reader)
                target[:] = values
        return states

    def parameter(self, number: int) -> Parameter:
        """A tensor of the layout at the start of the replay. Raises `CorruptError` if the state does not have it."""
        assert self.start.parameters is not None
        tensor = self.segment.layout.tensors[number]
        parameter = self.start.parameters.get(tensor.name)
        if parameter is None or parameter.weight.shape != tensor.shape:
            raise CorruptError(
                f"the log belongs to another model: the state at step {self.start.step} has no `{tensor.name}` of "
                f"shape {list(tensor.shape)}",
                where=self.segment.folder,
            )
        return parameter

    def _check_fresh(self, rank: int, part: VectorPart, state: str, parameter: Parameter) -> None:
        """Raise `IncompleteError` unless the part has taken no step yet: only then may a state be missing, and is
        zero."""
        count = int(self.counts(rank, self.start.step)[part.vector])
        if count:
            raise IncompleteError(
                f"`{parameter.name}` has no {state!r} at step {self.start.step}, after {count} of its steps",
                where=self.segment.folder,
            )

    def _decode(self, record: LogRecord, rank: int, index: int, out: Array, reader: Reader) -> bool:
        """Fill `out`, (n,) float32, from a chunk. Returns False if the record does not have it.

        Raises `CorruptError`.
        """
        path = self.segment.path(rank)
        if index >= record.count:
            raise CorruptError(f"step {record.step}: its record has no chunk {index}", where=path)
        data, digest = record.read_chunk(path, index, out.nbytes + MAX_CHUNK_OVERHEAD, reader)
        if not data.size:
            return False
        codec = self.codec if record.kind is Kind.GRADIENTS else gradient_codec("exact")
        try:
            codec.decode_into(data.data, out, None)
        except CodecError as error:
            raise self._damaged_error(record, rank, index, str(error)) from None
        if hash_values(out) != digest:
            raise self._damaged_error(record, rank, index, "its values do not fit their hash")
        reader.chunks += 1
        return True

    def _damaged_error(self, record: LogRecord, rank: int, index: int, why: str) -> CorruptError:
        is_state = record.kind is Kind.STATE
        content = "the state at the start of the log" if is_state else f"the gradients of step {record.step}"
        good = record.step - 1
        return CorruptError(
            f"{content}: chunk {index} of rank {rank} cannot be decoded: {why}",
            where=self.segment.path(rank),
            hint=None if is_state else f"Step {good} does not need it: `--step {good}`.",
        )

    @cached_property
    def fingerprints(self) -> dict[tuple[int, int], LogRecord]:
        """The fingerprints of the segment, by rank and step."""
        return {
            (rank, record.step): record
            for rank in range(len(self.segment.logs))
            for record in self.segment.records(rank, Kind.FINGERPRINT)
        }

    def _verify(self, rank: int, index: int, step: int, states: States, ranges: list[ChunkRange]) -> None:
        """Compare a chunk with the fingerprint that the run recorded at this step. Raises `CorruptError`."""
        record = self.fingerprints.get((rank, step))
        if record is None or (step > self.start.step and not self.segment.is_exact):
            return
        digests = record.meta.get("digests")
        for name, values in states.items():
            expected = digests.get(name) if isinstance(digests, dict) else None
            if expected is None:
                continue
            if not isinstance(expected, list) or len(expected) != self.segment.layout.ranks[rank].chunk_count:
                raise CorruptError(
                    f"step {step}: the fingerprint belongs to another layout", where=self.segment.path(rank)
                )
            compared = with_one_nan(values) if record.meta.get("nan") == "one" else values
            if expected[index] != hash_values(compared):
                raise self._difference_error(step, name, ranges)

    def _difference_error(self, step: int, state: str, ranges: list[ChunkRange]) -> CorruptError:
        names = dict.fromkeys(self.segment.layout.tensors[one.part.tensor].name for one in ranges)
        shown = list_names(names)
        if step == self.start.step:
            return CorruptError(
                f"the state at step {step} is not the one that the run had: {_described(state)} of {shown} differs",
                where=self.segment.folder,
                hint="The log belongs to another state of this step: append that state, or record again.",
            )
        return CorruptError(
            f"step {step}: {_described(state)} of {shown} differs from the run: the replay of its gradients gives "
            "other values",
            where=self.segment.folder,
            hint="Either the hardware of the run computed wrong results after the last fingerprint, or its optimizer "
            "rounds in another way than in the recorder's probe.",
        )


class _ChunkCounts:
    """The number of steps that each vector in a chunk has taken, from one step to the next.

    A table of all steps and vectors would be as large as the product of both, which a small file can state.
    """

    def __init__(self, before: Array, vectors: tuple[OptimizerVector, ...], ranges: list[ChunkRange]) -> None:
        """Begin with the counts of all vectors of the rank: (vectors,) int64."""
        self._vectors = vectors
        self._single = {number: int(before[number]) for number in {one.part.vector for one in ranges}}
        self._whole = Counter[int]()
        """The steps of all vectors of an optimizer, by optimizer."""

    def add(self, updates: tuple[LoggedUpdate, ...]) -> None:
        """Count all updates of the next step."""
        for update in updates:
            if update.vectors is None:
                self._whole[update.optimizer] += 1
            else:
                for number in self._single.keys() & update.vectors:
                    self._single[number] += 1

    def __getitem__(self, number: int) -> int:
        return self._single[number] + self._whole[self._vectors[number].optimizer]


def _runs(
    update: LoggedUpdate,
    ranges: list[ChunkRange],
    vectors: tuple[OptimizerVector, ...],
    tensors: tuple[LoggedTensor, ...],
    counts: _ChunkCounts,
    is_whole: bool,
) -> Iterator[tuple[tuple[int, str, int, Shape], int, int, int]]:
    """The ranges of a chunk to step together, each tensor by itself if `is_whole`.

    Each has its group, dtype, count and shape; the number of its elements in complete SIMD vectors; start, stop.
    """
    run: tuple[tuple[int, str, int, Shape], int, int, int] | None = None
    for one in ranges:
        number = one.part.vector
        vector = vectors[number]
        in_update = number in update.vectors if update.vectors is not None else vector.optimizer == update.optimizer
        if not in_update:
            continue
        key = (
            vector.group,
            tensors[one.part.tensor].stepped,
            counts[number],
            one.part.box.shape if is_whole else (-1,),
        )
        stop, is_single = one.offset + one.size, is_whole
        if run is not None and not is_single and run[0] == key and run[3] == one.offset and run[1] == run[3] - run[2]:
            run = (key, run[1] + one.vectorized, run[2], stop)
            continue
        if run is not None:
            yield run
        run = (key, one.vectorized, one.offset, stop)
    if run is not None:
        yield run


def _start_blobs(parameter: Parameter, states: tuple[str, ...], dtype: str) -> dict[str, Blob | None]:
    """The states of a parameter, each of `dtype`, by the names that steps use; None for a missing state."""
    blobs: dict[str, Blob | None] = {name: parameter.states.get(from_stored(name)) for name in states}
    blobs[WEIGHTS] = parameter.states.get(MASTER, parameter.states.get(MODEL))
    for name, blob in blobs.items():
        if blob is not None and blob.dtype != DTYPES[dtype]:
            raise UnsupportedError(f"`{parameter.name}`: {name!r} is {blob.dtype.name}; steps need {dtype}")
    return blobs


class _Cache:
    """A cache of the most recent chunks. Two threads never compute the same chunk."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[int, int], States] = OrderedDict()
        self._pending: dict[tuple[int, int], threading.Lock] = {}

    def __reduce__(self) -> tuple[type["_Cache"], tuple[int]]:
        return _Cache, (self._max_nbytes,)

    def get(self, key: tuple[int, int], compute: Callable[[], States]) -> States:
        with self._lock:
            pending = self._pending.setdefault(key, threading.Lock())
        with pending:
            with self._lock:
                if key in self._chunks:
                    self._chunks.move_to_end(key)
                    return self._chunks[key]
            states = compute()
            with self._lock:
                self._chunks[key] = states
                sizes = list(map(_nbytes, self._chunks.values()))
                limit = max(self._max_nbytes, _TURNS * max(sizes))
                while len(self._chunks) > 1 and sum(map(_nbytes, self._chunks.values())) > limit:
                    dropped, _ = self._chunks.popitem(last=False)
                    self._pending.pop(dropped, None)
        return states


def _described(state: str) -> str:
    """A state, as messages name it: the weights are those that the optimizer updates, masters or not."""
    return "the weight" if state == WEIGHTS else repr(state)


def _nbytes(states: States) -> int:
    return sum(values.nbytes for values in states.values())


@dataclass(frozen=True, eq=False)
class ParameterReplay:
    """All states of one tensor at a step: a `StatesReplay` of `universal.replay`."""

    segment: SegmentReplay
    tensor: int
    shape: Shape
    form: Mapping[str, DType]
    """The states by their names in the checkpoint, each float32."""
    aliases: Mapping[str, str]
    """The names that steps use, by those names."""
    parts: tuple[tuple[int, int], ...]
    """The parts of the tensor: each a rank, and the index of the part in its layout."""

    @cached_property
    def chunking(self) -> Chunking:
        return Chunking(self.shape, (CHUNK,))

    def values(self, index: int, reader: Reader) -> Mapping[str, Array]:
        """A chunk of all states, by name: each (n,) float32. Raises `CorruptError`."""
        start, stop = self.chunking.range(index)
        key = (self.segment.segment.folder, self.segment.step, self.tensor, index)
        packed = reader.cached_or(key, lambda: self._gather(start, stop, reader).reshape(-1))
        return dict(zip(self.form, packed.reshape(len(self.form), -1), strict=True))

    def pieces(self, box: Box) -> Iterator[tuple[Place, Box]]:
        """See `StatesReplay.pieces`: the place is the segment, the rank, and the number of the chunk of its vector."""
        folder = str(self.segment.segment.folder)
        for rank, index, there, _ in self._runs(box):
            common = there & box
            if common is not None:
                yield (folder, rank, index), common

    def read_into(self, state: str, box: Box, out: Array, reader: Reader) -> None:
        """See `StatesReplay.read_into`. Of float32 values of any shape."""
        runs = list(self._runs(box))
        if len({(rank, index) for rank, index, _, _ in runs}) != 1:
            read_chunks(out, box, self.chunking, lambda index: self.values(index, reader)[state])
            return
        values = self.segment.chunk(runs[0][0], runs[0][1], reader)[self.aliases[state]]
        for _, _, there, offset in runs:
            both = there & box
            if both is not None:
                source = values[offset : offset + there.size].reshape(there.shape)
                out[both.within(box).index] = source[both.within(there).index]

    def _runs(self, box: Box) -> Iterator[tuple[int, int, Box, int]]:
        """The blocks in the vectors of ranks among which all are that have elements of a block of the tensor.

        Of each: the rank, its chunk, the block, and where it begins in the chunk.
        """
        for rank, number in sorted(self.parts):
            layout = self.segment.segment.layout.ranks[rank]
            part, begin = layout.parts[number], layout.starts[number]
            common = box & part.box
            if common is None:
                continue
            low, high = flat_ends(common.within(part.box), part.box.shape)
            low, high = max(low, part.start), min(high, part.stop)
            while low < high:
                at = begin + low - part.start
                index = layout.chunk_of(at)
                start, stop = layout.chunk_bounds(index)
                end = min(high, stop - begin + part.start)
                offset = at - start
                for run in flat_boxes(part.box.shape, low, end):
                    yield rank, index, run.shift(part.box.start), offset
                    offset += run.size
                low = end

    def sources(self, box: Box) -> Iterator[FileBlob]:
        """The file ranges of the state at the start of the log. (The log itself may still grow.)"""
        if self.segment.start.parameters is not None:
            dtype, parameter = (
                self.segment.segment.layout.tensors[self.tensor].stepped,
                self.segment.parameter(self.tensor),
            )
            for blob in _start_blobs(parameter, tuple(self.aliases.values()), dtype).values():
                if blob is not None:
                    yield from blob.crop(box).sources()

    def _gather(self, start: int, stop: int, reader: Reader) -> Array:
        out = np.empty((len(self.form), stop - start), np.float32)
        wanted, at = [], 0
        for box in flat_boxes(self.shape, start, stop):
            wanted.append((box, at))
            at += box.size
        for rank, number in self.parts:
            part = self.segment.segment.layout.ranks[rank].parts[number]
            for box, offset in wanted:
                common = box & part.box
                if common is not None:
                    self._copy(rank, number, part, common, box, out[:, offset : offset + box.size], reader)
        return out

    def _copy(
        self, rank: int, number: int, part: VectorPart, common: Box, box: Box, out: Array, reader: Reader
    ) -> None:
        """Copy the elements of a part that are in `common` to `out`: (states, n) float32, the elements of `box`."""
        layout, block = self.segment.segment.layout.ranks[rank], part.box.shape
        low, high = flat_ends(common.within(part.box), block)
        low, high = max(low, part.start), min(high, part.stop)
        begin = layout.starts[number]
        while low < high:
            index = layout.chunk_of(begin + low - part.start)
            chunk_start, chunk_stop = layout.chunk_bounds(index)
            end = min(high, part.stop, chunk_stop - begin + part.start)
            states = self.segment.chunk(rank, index, reader)
            offset = begin + low - part.start - chunk_start
            for sub_box in flat_boxes(block, low, end):
                there = sub_box.shift(part.box.start)
                both = there & box
                if both is not None:
                    for row, name in enumerate(self.aliases.values()):
                        source = states[name][offset : offset + sub_box.size].reshape(sub_box.shape)
                        target = out[row].reshape(box.shape)
                        target[both.within(box).index] = source[both.within(there).index]
                offset += sub_box.size
            low = end
