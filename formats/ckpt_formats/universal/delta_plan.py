"""Whether and how the states of a parameter are to be stored as a delta, estimated from a few of its chunks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod

from ckpt_codecs import CodecError, NotApplicable, Rounded
from ckpt_codecs.delta import MAX_ROWS, DeltaCodec, StatePair, StateTypes, StepInfo
from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.state_names import STORED_MODEL, from_stored, to_stored
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal.check_index import MAX_DELTA_CHUNK_NBYTES
from ckpt_formats.universal.encode_state import ROW_NBYTES, choose_for, flat
from ckpt_formats.universal.model_copy import ModelCopy

_COUNT = "step"
"""What torch calls the state that counts the optimizer's steps. It is a float, too."""


@dataclass(frozen=True)
class DeltaBase:
    """What a parameter is to be coded against, and how."""

    earlier: Parameter | None
    """The parent's parameter of the same name; None for one that needs no parent."""
    codec: DeltaCodec
    step: StepInfo = field(default_factory=StepInfo)


@dataclass(frozen=True)
class DeltaPlan:
    """How a parameter is to be stored as a delta. States have their stored names here, which codecs know."""

    after: Mapping[str, Tensor]
    """The states that go in, as vectors."""
    before: Mapping[str, Tensor]
    codec: DeltaCodec
    shape: Shape

    @cached_property
    def chunking(self) -> Chunking:
        return Chunking.default(self.shape)

    @property
    def has_rows(self) -> bool:
        """Whether a row may be equal in all states to that before."""
        return len(self.chunking.chunk) == 2 and self.before.keys() == self.after.keys()

    @property
    def form(self) -> StateTypes:
        return {state: tensor.dtype for state, tensor in self.after.items()}

    def change(self, index: int, transfer: Transfer, counted: bool = True) -> StatePair:
        """A chunk of all states at both steps. The arrays are valid until the next call."""
        box = self.chunking.box(index)
        form = self.chunking.chunk_shape(box.size)
        # One step after the other: of each, all states of a chunk are decoded together, and kept only so long.
        after = {
            state: transfer.fetch(tensor, box, f"after/{state}", counted).reshape(form)
            for state, tensor in self.after.items()
        }
        before = {
            state: transfer.fetch(tensor, box, f"before/{state}", counted=False).reshape(form)
            for state, tensor in self.before.items()
        }
        return StatePair(before, after)

    def changes(self, transfer: Transfer) -> Iterator[StatePair]:
        """All chunks, each in arrays of its own."""
        for index in range(self.chunking.count):
            yield _copied(self.change(index, transfer, counted=False))


def sample(parameter: Parameter, against: DeltaBase, transfer: Transfer) -> tuple[int, StatePair] | None:
    """How many elements a parameter has, and its middle chunk as the codec will be given it; None if it gets none.

    Where rows did not change, only the others count: a codec fits its scale to what it has to encode.
    """
    plan = next(_drafts(parameter, against, transfer), None)
    if plan is None:
        return None
    change = plan.change(plan.chunking.count // 2, transfer, counted=False)
    changed = change.changed_rows() if plan.has_rows and plan.codec.of_rows() is not None else None
    if changed is None or changed.mean() > MAX_ROWS:
        return prod(plan.shape), _copied(change)
    return (max(1, int(prod(plan.shape) * changed.mean())), change.rows(changed)) if changed.any() else None


def plan_delta(
    parameter: Parameter, against: DeltaBase, coding: EncodingOptions, transfer: Transfer
) -> DeltaPlan | None:
    """How to store a parameter as a delta, by two of its chunks; None if its states are better stored alone."""
    for draft in _drafts(parameter, against, transfer):
        samples = _samples(draft.chunking.count)
        try:
            plan, coded = min(
                (_fitted(draft, codec, against.step, samples, transfer) for codec in _codecs(draft, samples, transfer)),
                key=lambda fitted: fitted[1],
            )
        except CodecError:  # also of what was fitted to values that nothing can be fitted to
            continue
        elements = sum(plan.chunking.box(index).size for index in samples)
        alone = sum(
            elements * tensor.dtype.itemsize * _alone(parameter, from_stored(state), coding, transfer)
            for state, tensor in plan.after.items()
        )
        return plan if coded + ROW_NBYTES * len(samples) < alone else None
    return None


def with_codec(parameter: Parameter, against: DeltaBase, transfer: Transfer) -> DeltaPlan | None:
    """How to store a parameter as a delta with a codec that was fitted to another one; None if it gets none."""
    return next(_drafts(parameter, against, transfer), None)


def predicted_ratio(
    parameter: Parameter, against: DeltaBase | None, coding: EncodingOptions, transfer: Transfer, at: int
) -> float:
    """Bytes for each raw one that a parameter would take, by the chunk that holds element `at`, and two more."""
    plan = None if against is None else plan_delta(parameter, against, coding, transfer)
    inside = () if plan is None else tuple(map(from_stored, plan.after))
    stored = 0.0
    if plan is not None:
        index = at // plan.chunking.chunk_size
        try:
            coded = len(plan.codec.encode(plan.change(index, transfer, counted=False))) + ROW_NBYTES
        except NotApplicable:
            return predicted_ratio(parameter, None, coding, transfer, at)
        stored = coded * prod(plan.shape) / plan.chunking.box(index).size
    for state, tensor in parameter.states.items():
        if state not in inside and tensor.size and not (state == MODEL and is_derived(parameter, transfer)):
            stored += tensor.nbytes * _alone(parameter, state, coding, transfer)
    return stored / max(1, parameter.nbytes)


def is_derived(parameter: Parameter, transfer: Transfer) -> bool:
    """Is the model's copy the master, rounded, in the two chunks that tell of all?"""
    return ModelCopy.of(parameter) is not None and _is_rounded(
        parameter, Chunking.default(parameter.weight.shape), transfer
    )


def _drafts(parameter: Parameter, against: DeltaBase, transfer: Transfer) -> Iterator[DeltaPlan]:
    """The ways to store a parameter as a delta, the best first, with a codec that is yet to be fitted."""
    shape = parameter.weight.shape
    chunking = Chunking.default(shape)
    states = {to_stored(state): flat(tensor) for state, tensor in parameter.states.items() if tensor.shape == shape}
    nbytes = chunking.chunk_size * sum(tensor.dtype.itemsize for tensor in states.values())
    if not prod(shape) or nbytes > MAX_DELTA_CHUNK_NBYTES or parameter.role == "extra":
        return
    if ModelCopy.of(parameter) is not None and _is_rounded(parameter, chunking, transfer):
        states.pop(STORED_MODEL, None)
    floats = {state: tensor for state, tensor in states.items() if is_float(tensor.dtype)}
    # What a lossy codec is given it may change: integers, truth values and counts are no matter of degree.
    degrees = {state: tensor for state, tensor in floats.items() if state != _COUNT}
    lossless = (states, floats) if floats.keys() < states.keys() else (states,)
    for after in lossless if against.codec.lossless else (degrees,):
        before = _before(after, shape, against.earlier)
        if after and (against.earlier is None or before):
            yield DeltaPlan(after, before, against.codec, shape)


def _codecs(draft: DeltaPlan, samples: list[int], transfer: Transfer) -> Iterator[DeltaCodec]:
    """The codec of a draft, and the one that leaves out rows that did not change, where a sample has such rows."""
    yield draft.codec
    of_rows = draft.codec.of_rows() if draft.has_rows else None
    if of_rows is not None:
        changes = (draft.change(index, transfer, counted=False).changed_rows() for index in samples)
        if any(changed is not None and changed.mean() <= MAX_ROWS for changed in changes):
            yield of_rows


def _fitted(
    draft: DeltaPlan, codec: DeltaCodec, step: StepInfo, samples: list[int], transfer: Transfer
) -> tuple[DeltaPlan, int]:
    """The draft with a codec that is fitted to it, and the bytes of the samples."""
    fitted = codec.fit(partial(draft.changes, transfer), step)
    plan = replace(draft, codec=fitted)
    return plan, sum(len(fitted.encode(plan.change(index, transfer, counted=False))) for index in samples)


def _samples(count: int) -> list[int]:
    """The chunks that tell of all."""
    return sorted({0, count // 2})


def _copied(change: StatePair) -> StatePair:
    """In arrays of its own."""
    return StatePair(*({state: values.copy() for state, values in s.items()} for s in (change.before, change.after)))


def _before(after: Mapping[str, Tensor], shape: Shape, earlier: Parameter | None) -> dict[str, Tensor]:
    known = {} if earlier is None else {to_stored(state): tensor for state, tensor in earlier.states.items()}
    fitting = {state: known[state] for state in after if state in known}
    return {
        state: flat(tensor)
        for state, tensor in fitting.items()
        if tensor.shape == shape and tensor.dtype == after[state].dtype
    }


def _is_rounded(parameter: Parameter, chunking: Chunking, transfer: Transfer) -> bool:
    master, copy = (flat(parameter.states[state]) for state in (MASTER, MODEL))
    for index in _samples(chunking.count):
        box = chunking.box(index)
        values = transfer.fetch(copy, box, "copy", counted=False)
        try:
            Rounded().encode(values, transfer.fetch(master, box, counted=False))
        except NotApplicable:
            return False
    return True


def _alone(parameter: Parameter, state: str, coding: EncodingOptions, transfer: Transfer) -> float:
    """Bytes for each raw one if a state is coded without the parent, estimated from two of its chunks."""
    tensor = parameter.states[state]
    chunking = Chunking.default(tensor.shape)
    samples = _samples(chunking.count)
    choice = choose_for(parameter, state, coding, transfer, samples)
    raw = sum(chunking.box(index).size for index in samples) * tensor.dtype.itemsize
    return 1.0 if choice is None else choice.nbytes / raw
