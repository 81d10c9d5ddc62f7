"""The state at a step of a segment, as a checkpoint."""

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

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
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.identity import note_records
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import ArrayBlob, Blob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, tensor_names
from ckpt_formats.universal.gradients.layout import UPDATE, LoggedOptimizer, LoggedTensor
from ckpt_formats.universal.gradients.noted_tensors import names_for_noted_tensors, noted_tensor
from ckpt_formats.universal.gradients.recorded_values import RecordedValues, recorded_values
from ckpt_formats.universal.gradients.replay import FLOAT32, ParameterReplay, SegmentReplay, StartState
from ckpt_formats.universal.gradients.segment import LOSSY, Segment
from ckpt_formats.universal.replay import DeltaBlob

_STATES_OF_FLAGS = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered"}
"""States that groups of an optimizer have only with a flag."""
_COUNT = "step"
_WITHOUT_COUNT = ("SGD", "Muon")
"""Optimizers that count no steps."""


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
    checkpoint = checkpoint_of(replay_to(segment, step, base), None if base is None else base.checkpoint)
    for rank in range(len(segment.logs)):
        note_records(segment.path(rank), segment.hash_upto(rank, step))
    return checkpoint


def checkpoint_of(replay: SegmentReplay, source: Checkpoint | None) -> Checkpoint:
    """The state that a replay gives. `source`: the base that it starts from, None for the segment's own state."""
    segment, step = replay.segment, replay.step
    with Reader(check=False) as reader:
        notes = segment.notes(step, reader)
        random = segment.random_states(step, reader)
    recorded = recorded_values(segment, step)
    parameters = dict(source.parameters) if source is not None else {}
    parameters |= {parameter.name: parameter for parameter in _recorded(replay, recorded, parameters)}
    parameters |= {parameter.name: parameter for parameter in _stepped(replay, recorded, parameters)}
    parameters |= {parameter.name: parameter for parameter in _tied(parameters, segment.layout.aliases)}
    extras = dict(source.extras) if source is not None else {}
    noted = dict(recorded.extras) | notes | ({"random_states": random} if random else {})
    replaced = {name: extras.pop(name) for name in noted if name in extras}
    for name in set(tensor_names(replaced)).difference(tensor_names(extras)):
        parameters.pop(name, None)  # a tensor of an extra of the base, in whose place the run noted another value
    groups = tuple(_groups(replay, source))
    groups = tuple(
        Group(_with_tensors(dict(group.options), f"param_groups/{i}", parameters), group.names)
        for i, group in enumerate(groups)
    )
    extras |= {name: names_for_noted_tensors(value, name, parameters) for name, value in noted.items()}
    return Checkpoint(
        path=segment.folder,
        origin=_origin(segment, step, source),
        parameters=parameters,
        groups=groups,
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


def _stepped(
    replay: SegmentReplay, recorded: RecordedValues, parameters: Mapping[str, Parameter]
) -> Iterator[Parameter]:
    """The parameters whose steps are replayed. `parameters`: those of the base."""
    layout = replay.segment.layout
    parts: list[list[tuple[int, int]]] = [[] for _ in layout.tensors]
    counts, optimizers = [0] * len(layout.tensors), [0] * len(layout.tensors)
    unused: list[set[str]] = [set() for _ in layout.tensors]
    options = replay.segment.group_options(replay.step)
    for rank, rank_layout in enumerate(layout.ranks):
        now = replay.counts(rank, replay.step)
        for number, part in enumerate(rank_layout.parts):
            parts[part.tensor].append((rank, number))
            counts[part.tensor] = int(now[part.vector])
            vector = rank_layout.vectors[part.vector]
            optimizers[part.tensor] = vector.optimizer
            group = options[vector.optimizer][vector.group] if vector.optimizer in options else {}
            unused[part.tensor] |= {state for state, flag in _STATES_OF_FLAGS.items() if group.get(flag) is False}
    updated = {name for one in layout.optimizers if one.method == UPDATE for names in one.groups for name in names}
    for number, tensor in enumerate(layout.tensors):
        if tensor.name in recorded.tensors or tensor.name in updated:
            continue  # the log has its values as they are, from its last step on
        yield _stepped_parameter(
            *(replay, number, parameters.get(tensor.name), tuple(parts[number])),
            *(optimizers[number], counts[number], unused[number]),
        )


def _stepped_parameter(
    replay: SegmentReplay,
    number: int,
    before: Parameter | None,
    parts: tuple[tuple[int, int], ...],
    optimizer: int,
    count: int,
    unused: Collection[str],
) -> Parameter:
    """One parameter after `count` of its steps. `unused`: states that its group does not have, unless the base has.

    Raises `CorruptError` or `UnsupportedError` if the base does not fit.
    """
    tensor = replay.segment.layout.tensors[number]
    model, states = DTYPES[tensor.dtype], {} if before is None else before.states
    own = DTYPES[tensor.stepped]
    master = MASTER if MASTER in states or (before is None and model != own) else MODEL
    names = {master: WEIGHTS} | {from_stored(name): name for name in replay.states_of[optimizer] if name != WEIGHTS}
    counted = {name: _count_tensor(state, count) for name, state in states.items() if _is_count(name, state)}
    if before is not None:
        _check_base(replay, tensor, before, master, {*names, *counted, MODEL})
    one = ParameterReplay(replay, number, tensor.shape, dict.fromkeys(names, FLOAT32), names, parts)
    replayed = {name: DeltaBlob.whole(one, name) for name in names}
    stepped = {name: Tensor.of(_narrowed(blob, own)) for name, blob in replayed.items()} | counted
    if master == MASTER and (before is None or MODEL in states):
        dtype = model if before is None else states[MODEL].dtype
        stepped[MODEL] = Tensor.of(DerivedBlob(Rounded(), stepped[MASTER].fragments[0].blob, dtype))
    order = [*(name for name in states if name in stepped)]
    order += (name for name in stepped if name not in states and name not in unused)
    logged = replay.segment.layout.optimizers[optimizer]
    counts_steps = len(names) > 1 and not counted and _counts_steps(logged, states)
    values = _values(before, count, counts_steps, replay.segment.folder)
    return Parameter(tensor.name, "parameter", {name: stepped[name] for name in order}, values)


def _narrowed(blob: DeltaBlob, dtype: DType) -> Blob:
    """Replayed values, which are float32, in the dtype in which the optimizer steps them: they round to themselves."""
    return blob if dtype == FLOAT32 else DerivedBlob(Rounded(), blob, dtype)


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
    if weights is None or weights.dtype != DTYPES[tensor.stepped]:
        kind = "master weights" if tensor.dtype != tensor.stepped else "weights"
        raise UnsupportedError(f"`{name}` has no {kind} in {tensor.stepped} at step {step}", where=where)
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
    return not has_states and optimizer.type.rpartition(".")[2] not in _WITHOUT_COUNT


def _values(before: Parameter | None, count: int, counts_steps: bool, where: Path) -> dict[str, Value]:
    values = {} if before is None else dict(before.values)
    if before is not None and _COUNT in values:
        known = values[_COUNT]
        if not isinstance(known, (int, float)) or isinstance(known, bool):
            raise CorruptError(f"`{printable(before.name)}` has a count of steps that is no number", where=where)
        values[_COUNT] = type(known)(count)
    elif counts_steps:
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


def _with_tensors(value: Value, place: str, parameters: MutableMapping[str, Parameter]) -> Value:
    """The options of a group with the tensors that the log has as arrays."""
    if isinstance(value, np.ndarray):
        return names_for_noted_tensors(noted_tensor(value), place, parameters)
    if isinstance(value, dict):
        return {key: _with_tensors(one, f"{place}/{key}", parameters) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_with_tensors(one, f"{place}/{i}", parameters) for i, one in enumerate(value))
    return value


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
    if step == segment.last and segment.limit is None:
        for path, reason in segment.torn.items():
            yield Notice(f"step {step} is the last one that is complete in the log: {path.name}: {reason}")
    if step == start:
        return
    approximate = [one.type for one in segment.layout.optimizers if one.exactness == "approximate"]
    if approximate:
        text = f"approximate: the replay of {approximate[0]} rounds in another way than the run"
        yield Notice(text, weight=Weight.LOST)
    if segment.layout.codec in LOSSY:
        yield Notice(f"approximate: the gradients were logged as {segment.layout.codec}", weight=Weight.LOST)
    same = [one for one in segment.layout.optimizers if one.exactness == "same library"]
    if same:
        facts = [f"{name} {value}" for name, value in segment.layout.versions.items()]
        facts += dict.fromkeys(f"threads {one.threads}" for one in same if one.threads is not None)
        text = f"exact on a machine like that of the run: {same[0].type} itself replays its steps ({', '.join(facts)})"
        yield Notice(text)
    if segment.difference is not None and step > segment.proved:
        yield Notice(f"the log differs from the run: {segment.difference}", weight=Weight.LOST)
    elif segment.has_proofs and step > segment.proved:
        yield Notice(f"not proved: the run compared its log with its states up to step {segment.proved}")
    if doubtful := segment.doubt(step):
        text = "not proved: the run changed these tensors at this step or later, in a way that torch does not count"
        yield Notice(text, doubtful, weight=Weight.LOST)
    stale = [name for name in base.extras if name not in notes] if base is not None else []
    if stale:
        yield Notice(
            f"the run did not note these extras at step {step}, so they are those of step {start}", tuple(stale)
        )


def _recorded(
    replay: SegmentReplay, recorded: RecordedValues, parameters: Mapping[str, Parameter]
) -> Iterator[Parameter]:
    """The parameters whose values the log has as they are. `parameters`: those of the base."""
    logged = {tensor.name: tensor for tensor in replay.segment.layout.tensors}
    for name, tensors in recorded.tensors.items():
        before, role = parameters.get(name), recorded.roles[name]
        if role == "parameter":
            if name not in logged:
                raise CorruptError(f"`{printable(name)}` is in no layout", where=replay.segment.folder)
            yield _updated_parameter(logged[name], tensors, before, recorded.values.get(name, {}))
        elif WEIGHTS not in tensors:
            raise CorruptError(f"`{printable(name)}` has no values", where=replay.segment.folder)
        elif role == "extra":
            yield Parameter(name, role, {MODEL: tensors[WEIGHTS]})
        else:
            yield _with_value(before, name, role, tensors[WEIGHTS], replay.segment.folder)


def _updated_parameter(
    logged: LoggedTensor, tensors: Mapping[str, Tensor], before: Parameter | None, values: Mapping[str, Value]
) -> Parameter:
    """A parameter of an optimizer whose steps are not replayed, with all states that the log has of it."""
    states = {} if before is None else before.states
    weights, model = tensors[WEIGHTS], DTYPES[logged.dtype]
    master = MASTER if MASTER in states or weights.dtype != model else MODEL
    current = {master: weights} | {from_stored(name): tensor for name, tensor in tensors.items() if name != WEIGHTS}
    if master == MASTER:
        current[MODEL] = Tensor.of(DerivedBlob(Rounded(), weights, model))
    return Parameter(logged.name, "parameter", current, values)


def _with_value(before: Parameter | None, name: str, role: Role, tensor: Tensor, where: Path) -> Parameter:
    """The parameter of the base with its recorded value, or a new parameter."""
    if before is None:
        return Parameter(name, role, {MODEL: tensor})
    if before.weight.shape != tensor.shape or before.weight.dtype != tensor.dtype:
        raise CorruptError(f"`{printable(name)}` has another shape or type in the log", where=where)
    state = MODEL if MODEL in before.states else MASTER
    return replace(before, states={**before.states, state: tensor})
