"""The state at a step of a segment, as a checkpoint."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from ckpt_codecs.lossless.rounded import Rounded
from ckpt_codecs.optimizers import WEIGHTS
from ckpt_formats.core.checkpoint import (
    MASTER,
    MODEL,
    Checkpoint,
    ErrorFigures,
    Group,
    Origin,
    OriginalForm,
    Parameter,
    Role,
)
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Array, ArrayBlob, Blob, DerivedBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, tensor_names
from ckpt_formats.universal.chunked import read_chunks
from ckpt_formats.universal.gradients.layout import LoggedOptimizer, LoggedTensor
from ckpt_formats.universal.gradients.noted_tensors import names_for_noted_tensors
from ckpt_formats.universal.gradients.record import Kind, LogRecord, hash_values
from ckpt_formats.universal.gradients.replay import FLOAT32, ParameterReplay, SegmentReplay, StartState
from ckpt_formats.universal.gradients.segment import LOSSY, Segment
from ckpt_formats.universal.replay import DeltaBlob

BUFFER_CHUNK = 1 << 20
"""The maximum size of a chunk of a buffer in bytes."""
_COUNT = "step"
_ROLES: dict[str, Role] = {"buffer": "buffer", "frozen": "frozen"}


@dataclass(frozen=True)
class Base:
    """A state of the run from which the log is replayed."""

    step: int
    checkpoint: Checkpoint


def checkpoint_at(segment: Segment, step: int, base: Base | None) -> Checkpoint:
    """The state at a step, replayed from a base at an earlier step, or from the segment's own state if it is None.

    Raises `NotFoundError` if not all ranks have that step, and `CorruptError` if the log belongs to another run than
    the base.
    """
    if not segment.first <= step <= segment.last:
        raise NotFoundError(
            f"the log has steps {segment.first + 1} to {segment.last}, not {step}",
            where=segment.folder,
            hint="If the run continues, later steps appear when it writes them.",
        )
    return checkpoint_of(replay_to(segment, step, base), None if base is None else base.checkpoint)


def checkpoint_of(replay: SegmentReplay, source: Checkpoint | None) -> Checkpoint:
    """The state that a replay gives. `source`: the base that it starts from, None for the segment's own state."""
    segment, step = replay.segment, replay.step
    with Reader(check=False) as reader:
        notes = segment.notes(step, reader)
        random = segment.random_states(step, reader)
    buffers = dict(_buffers(segment, step))
    parameters = dict(source.parameters) if source is not None else {}
    parameters |= {name: _with_value(parameters.get(name), buffer) for name, buffer in buffers.items()}
    parameters |= {parameter.name: parameter for parameter in _stepped(replay, parameters)}
    parameters |= {parameter.name: parameter for parameter in _tied(parameters, segment.layout.aliases)}
    extras = dict(source.extras) if source is not None else {}
    noted = notes | ({"random_states": random} if random else {})
    replaced = {name: extras.pop(name) for name in noted if name in extras}
    for name in set(tensor_names(replaced)).difference(tensor_names(extras)):
        parameters.pop(name, None)  # a tensor of an extra of the base, in whose place the run noted another value
    extras |= {name: names_for_noted_tensors(value, name, parameters) for name, value in noted.items()}
    return Checkpoint(
        path=segment.folder,
        origin=_origin(segment, step, source),
        parameters=parameters,
        groups=tuple(_groups(replay, source)),
        extras=extras,
        aliases=source.aliases if source is not None else dict(segment.layout.aliases),
        files=() if source is None else source.files,
        seals=() if source is None else source.seals,
        notices=(*(() if source is None else source.notices), *_notices(replay, source, noted)),
        errors=_errors(replay, source, parameters),
        original=_original(source),
    )


def replay_to(segment: Segment, step: int, base: Base | None) -> SegmentReplay:
    """The replay up to a step, from a base or from the segment's own state. Raises `IncompleteError` if it has none."""
    if base is None and not segment.has_start:
        raise IncompleteError(
            f"the state at step {segment.first}, where the log begins, is missing",
            where=segment.folder,
            hint="The log starts from a state that the chain no longer has: restore that state from a copy.",
        )
    start = StartState(segment.first, None) if base is None else StartState(base.step, base.checkpoint.parameters)
    return SegmentReplay(segment, step, start)


def _original(source: Checkpoint | None) -> OriginalForm | None:
    """The original form of the base without the details of its own file, because this is another state."""
    if source is None or source.original is None:
        return None
    return OriginalForm(source.original.format, source.original.file)


def _stepped(replay: SegmentReplay, parameters: Mapping[str, Parameter]) -> Iterator[Parameter]:
    """The parameters that the optimizers step. `parameters`: those of the base."""
    layout = replay.segment.layout
    parts: list[list[tuple[int, int]]] = [[] for _ in layout.tensors]
    counts, optimizers = [0] * len(layout.tensors), [0] * len(layout.tensors)
    for rank, rank_layout in enumerate(layout.ranks):
        now = replay.counts(rank, replay.step)
        for number, part in enumerate(rank_layout.parts):
            parts[part.tensor].append((rank, number))
            counts[part.tensor] = int(now[part.vector])
            optimizers[part.tensor] = rank_layout.vectors[part.vector].optimizer
    for number, tensor in enumerate(layout.tensors):
        yield _stepped_parameter(
            *(replay, number, parameters.get(tensor.name), tuple(parts[number])),
            *(optimizers[number], counts[number]),
        )


def _stepped_parameter(
    replay: SegmentReplay,
    number: int,
    before: Parameter | None,
    parts: tuple[tuple[int, int], ...],
    optimizer: int,
    count: int,
) -> Parameter:
    """One parameter after `count` of its steps.

    Raises `CorruptError` or `UnsupportedError` if the base does not fit.
    """
    tensor = replay.segment.layout.tensors[number]
    model, states = DTYPES[tensor.dtype], {} if before is None else before.states
    master = MASTER if MASTER in states or (before is None and model != FLOAT32) else MODEL
    names = {master: WEIGHTS} | {name: name for name in replay.states_of[optimizer] if name != WEIGHTS}
    counted = {name: _count_tensor(state, count) for name, state in states.items() if _is_count(name, state)}
    if before is not None:
        _check_base(replay, tensor, before, master, {*names, *counted, MODEL})
    one = ParameterReplay(replay, number, tensor.shape, dict.fromkeys(names, FLOAT32), names, parts)
    stepped = {name: Tensor.of(DeltaBlob.whole(one, name)) for name in names} | counted
    if master == MASTER and (before is None or MODEL in states):
        dtype = model if before is None else states[MODEL].dtype
        stepped[MODEL] = Tensor.of(DerivedBlob(Rounded(), stepped[MASTER].fragments[0].blob, dtype))
    order = [*(name for name in states if name in stepped), *(name for name in stepped if name not in states)]
    logged = replay.segment.layout.optimizers[optimizer]
    counts_steps = len(names) > 1 and not counted and _counts_steps(logged, states)
    values = _values(before, count, counts_steps)
    return Parameter(tensor.name, "parameter", {name: stepped[name] for name in order}, values)


def _check_base(
    replay: SegmentReplay, tensor: LoggedTensor, before: Parameter, master: str, known: Collection[str]
) -> None:
    """Raise `CorruptError` or `UnsupportedError` if the parameter of the base cannot be stepped."""
    name, step, where = printable(tensor.name), replay.start.step, replay.segment.folder
    if before.weight.shape != tensor.shape:
        raise CorruptError(
            f"the log belongs to another model: `{name}` has shape {list(tensor.shape)} there, and "
            f"{list(before.weight.shape)} in the state at step {step}",
            where=where,
        )
    weights = before.states.get(master)
    if weights is None or weights.dtype != FLOAT32:
        raise UnsupportedError(f"`{name}` has no master weights in float32 at step {step}", where=where)
    for state in before.states:
        if state not in known:
            raise UnsupportedError(f"`{name}` has {state!r} at step {step}, which the log does not step", where=where)


def _tied(parameters: Mapping[str, Parameter], aliases: Mapping[str, str]) -> Iterator[Parameter]:
    """The base's parameters under other names of stepped tensors: DCP stores such weights twice."""
    for alias, name in aliases.items():
        if alias in parameters and name in parameters:
            weight = parameters[name].weight
            yield replace(parameters[alias], states={**parameters[alias].states, MODEL: weight})


def _is_count(name: str, state: Tensor) -> bool:
    """Is it the step count, which torch stores as a tensor?"""
    return name == _COUNT and prod(state.shape) == 1


def _count_tensor(state: Tensor, count: int) -> Tensor:
    return Tensor.of(ArrayBlob(np.full(state.shape, count, state.dtype)))


def _counts_steps(optimizer: LoggedOptimizer, states: Mapping[str, Tensor]) -> bool:
    """Does the optimizer store a step count for each tensor? It does not if the base has states without a count."""
    has_states = any(name not in (MODEL, MASTER) for name in states)
    return not has_states and optimizer.type.rpartition(".")[2] != "SGD"


def _values(before: Parameter | None, count: int, counts_steps: bool) -> dict[str, Value]:
    values = {} if before is None else dict(before.values)
    if _COUNT in values:
        values[_COUNT] = type(values[_COUNT])(count)
    elif counts_steps and count:
        values[_COUNT] = float(count)
    return values


def _origin(segment: Segment, step: int, base: Checkpoint | None) -> Origin:
    if base is not None:
        return replace(base.origin, step=step)
    return Origin("torch", str(segment.layout.versions.get("torch", "")) or None, step)


def _groups(replay: SegmentReplay, base: Checkpoint | None) -> Iterator[Group]:
    """The groups of the base with the options of the step; those of the log if the base is None or has no groups."""
    segment = replay.segment
    options = segment.group_options(replay.step)
    logged = [
        (names, options[number][i] if number in options else {})
        for number, optimizer in enumerate(segment.layout.optimizers)
        for i, names in enumerate(optimizer.groups)
    ]
    if base is None or not base.groups:
        yield from (Group(given, names) for names, given in logged)
        return
    by_name = {name: given for names, given in logged for name in names}
    for group in base.groups:
        given = next((by_name[name] for name in group.names if name in by_name), {})
        yield Group({**group.options, **given}, group.names)


def _errors(
    replay: SegmentReplay, base: Checkpoint | None, parameters: Mapping[str, Parameter]
) -> dict[tuple[str, str], ErrorFigures]:
    """The known error figures of all states whose replay is not exact."""
    errors, segment = {} if base is None else dict(base.errors), replay.segment
    steps = replay.step - replay.start.step
    if steps:
        for optimizer in segment.layout.optimizers:
            if optimizer.exactness == "approximate" or segment.layout.codec in LOSSY:
                figures = {"replayed_steps": steps, "codec": segment.layout.codec, **optimizer.figures}
                names = (name for group in optimizer.groups for name in group if name in parameters)
                errors |= {(name, state): figures for name in names for state in parameters[name].states}
    return errors


def _notices(replay: SegmentReplay, base: Checkpoint | None, notes: Mapping[str, Value]) -> Iterator[Notice]:
    segment, step, start = replay.segment, replay.step, replay.start.step
    if step == start:
        return
    approximate = [one.type for one in segment.layout.optimizers if one.exactness == "approximate"]
    if approximate:
        text = f"approximate: the replay of {approximate[0]} rounds in another way than the run"
        yield Notice(text, weight=Weight.LOST)
    if segment.layout.codec in LOSSY:
        yield Notice(f"approximate: the gradients were logged as {segment.layout.codec}", weight=Weight.LOST)
    same = [one.type for one in segment.layout.optimizers if one.exactness == "same library"]
    if same:
        versions = ", ".join(f"{name} {value}" for name, value in segment.layout.versions.items())
        yield Notice(f"exact on a machine like that of the run: {same[0]} itself replays its steps ({versions})")
    stale = [name for name in base.extras if name not in notes] if base is not None else []
    if stale:
        yield Notice(
            f"the run did not note these extras at step {step}, so they are those of step {start}", tuple(stale)
        )


@dataclass(frozen=True)
class _Buffer:
    """A recorded tensor that no optimizer steps."""

    segment: Segment
    rank: int
    record: LogRecord
    name: str
    role: Role
    first_chunk: int
    shape: Shape
    dtype: DType

    def values(self, index: int, reader: Reader) -> Array:
        """A chunk: (n,) of the dtype of the buffer. Raises `CorruptError`."""
        path = self.segment.path(self.rank)
        data, digest = self.record.read_chunk(path, self.first_chunk + index, BUFFER_CHUNK, reader)
        size = self.chunking.box(index).size * self.dtype.itemsize
        if data.size != size or hash_values(data) != digest:
            raise CorruptError(f"step {self.record.step}: `{printable(self.name)}` does not fit its hash", where=path)
        return data.view(self.dtype)

    @cached_property
    def chunking(self) -> Chunking:
        return Chunking(self.shape, (BUFFER_CHUNK // self.dtype.itemsize,))


@dataclass(frozen=True)
class _BufferBlob(Blob):
    """A block of a buffer."""

    buffer: _Buffer
    box: Box

    @property
    def shape(self) -> Shape:
        return self.box.shape

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype

    def crop(self, box: Box) -> "_BufferBlob":
        return _BufferBlob(self.buffer, box.shift(self.box.start))

    def read_into(self, out: Array, reader: Reader) -> None:
        buffer = self.buffer
        read_chunks(out, self.box, buffer.chunking, lambda index: buffer.values(index, reader))


def _buffers(segment: Segment, step: int) -> Iterator[tuple[str, _Buffer]]:
    """The records of each tensor up to a step, by name; a later one replaces an earlier one."""
    for rank in range(len(segment.logs)):
        for record in segment.records(rank, Kind.BUFFERS):
            if record.step > step:
                break
            rows, chunk = record.meta.get("tensors"), 0
            for row in rows if isinstance(rows, list) else ():
                name, role, dtype, shape = _row(row, segment)
                yield name, _Buffer(segment, rank, record, name, role, chunk, shape, DTYPES[dtype])
                each = BUFFER_CHUNK // DTYPES[dtype].itemsize
                chunk += -(-prod(shape) // each)
            if chunk != record.count:
                raise CorruptError(f"step {record.step}: its buffers do not fit their chunks", where=segment.path(rank))


def _row(row: object, segment: Segment) -> tuple[str, Role, str, Shape]:
    if isinstance(row, list) and len(row) == 4:
        name, role, dtype, shape = row
        sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 50 for n in shape)
        if isinstance(name, str) and role in _ROLES and dtype in DTYPES and sizes and prod(shape) < 1 << 50:
            return name, _ROLES[role], dtype, tuple(shape)
    raise CorruptError("a record of buffers is damaged", where=segment.path(0))


def _with_value(before: Parameter | None, buffer: _Buffer) -> Parameter:
    """The parameter of the base with its recorded value, or a new parameter."""
    tensor = Tensor.of(_BufferBlob(buffer, Box.whole(buffer.shape)))
    if before is None:
        return Parameter(buffer.name, buffer.role, {MODEL: tensor})
    if before.weight.shape != tensor.shape or before.weight.dtype != tensor.dtype:
        raise CorruptError(
            f"`{printable(buffer.name)}` has another shape or type in the log", where=buffer.segment.folder
        )
    state = MODEL if MODEL in before.states else MASTER
    return replace(before, states={**before.states, state: tensor})
