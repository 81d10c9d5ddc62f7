"""Writing the states of a parameter as a delta: which of them, whether it is worth it, and the bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from math import prod

import numpy as np
import xxhash

from ckpt_codecs import CodecError, NotApplicable, Rounded
from ckpt_codecs.delta import Change, DeltaCodec, Form, Step
from ckpt_formats.base import MASTER, MODEL, Parameter
from ckpt_formats.coded import ALIGNMENT, ENTRY, OVERHEAD, chunk_count, chunk_form
from ckpt_formats.coding import Coding
from ckpt_formats.dtypes import is_float
from ckpt_formats.errors import Unsupported
from ckpt_formats.files import write_all
from ckpt_formats.geometry import Box, Shape
from ckpt_formats.sealed_json import hash_text
from ckpt_formats.tensor import Array, Tensor
from ckpt_formats.transfer import Transfer, as_bytes
from ckpt_formats.universal.coded_state import choose_for, chunk_shape, flat
from ckpt_formats.universal.copies import Copy
from ckpt_formats.universal.entry import MOST_JOINT, Delta, State
from ckpt_formats.universal.loss import Measure
from ckpt_formats.universal.replay import Replayed, joint_digest

_COUNT = "step"
"""What torch calls the state that counts the optimizer's steps. It is a float, too."""


@dataclass(frozen=True)
class Against:
    """What a parameter is to be coded against, and how."""

    earlier: Parameter | None
    """The parent's parameter of the same name; None for one that needs no parent."""
    codec: DeltaCodec
    step: Step = field(default_factory=Step)


@dataclass(frozen=True)
class Plan:
    """How a parameter is to be stored as a delta."""

    after: Mapping[str, Tensor]
    """The states that go in, as vectors."""
    before: Mapping[str, Tensor]
    codec: DeltaCodec
    chunk: Shape
    shape: Shape

    @property
    def count(self) -> int:
        return chunk_count(self.shape, self.chunk)

    @property
    def form(self) -> Form:
        return {state: tensor.dtype for state, tensor in self.after.items()}

    def box(self, index: int) -> Box:
        each = prod(self.chunk)
        return Box((index * each,), (min((index + 1) * each, prod(self.shape)),))

    def change(self, index: int, transfer: Transfer, counted: bool = True) -> Change:
        """A chunk of all states at both steps. The arrays are valid until the next call."""
        box = self.box(index)
        form = chunk_form(self.chunk, box.size)
        # One step after the other: of each, all states of a chunk are decoded together, and kept only so long.
        after = {
            state: transfer.fetch(tensor, box, f"after/{state}", counted).reshape(form)
            for state, tensor in self.after.items()
        }
        before = {
            state: transfer.fetch(tensor, box, f"before/{state}", counted=False).reshape(form)
            for state, tensor in self.before.items()
        }
        return Change(before, after)

    def changes(self, transfer: Transfer) -> Iterator[Change]:
        """All chunks, each in arrays of its own."""
        for index in range(self.count):
            yield _kept(self.change(index, transfer, counted=False))


def sample(parameter: Parameter, against: Against, transfer: Transfer) -> tuple[int, Change] | None:
    """How many elements a parameter has, and its middle chunk as the codec will be given it; None if it gets none."""
    plan = next(_drafts(parameter, against, transfer), None)
    if plan is None:
        return None
    return prod(plan.shape), _kept(plan.change(plan.count // 2, transfer, counted=False))


def plan_delta(parameter: Parameter, against: Against, coding: Coding, transfer: Transfer) -> Plan | None:
    """How to store a parameter as a delta, told from two of its chunks; None if its states are better stored alone."""
    for draft in _drafts(parameter, against, transfer):
        samples = _samples(draft.count)
        try:
            codec = against.codec.fit(partial(draft.changes, transfer), against.step)
            plan = replace(draft, codec=codec)
            coded = sum(len(codec.encode(plan.change(index, transfer, counted=False))) for index in samples)
        except CodecError:  # also of what was fitted to values that nothing can be fitted to
            continue
        elements = sum(plan.box(index).size for index in samples)
        alone = sum(
            elements * tensor.dtype.itemsize * _alone(parameter, state, coding, transfer)
            for state, tensor in plan.after.items()
        )
        return plan if coded + ENTRY.itemsize * len(samples) < alone else None
    return None


def write_delta(
    out: FileIO, plan: Plan, copy: Copy | None, check: bool, transfer: Transfer, where: str
) -> tuple[Delta, dict[str, State]]:
    """Write all chunks, from where the file is on, then their directory.

    Raises `NotApplicable` if the codec cannot hold a chunk, or makes it longer than a reader takes.
    """
    at, nbytes, stored = out.tell(), 0, xxhash.xxh3_128()
    digests = {state: xxhash.xxh3_128() for state in plan.after}
    measures = {state: Measure() for state in plan.after}
    directory = np.empty(plan.count, ENTRY)
    lossless = plan.codec.lossless
    copied = None if copy is None else flat(copy.tensor)

    def write(data: bytes) -> None:
        write_all(out, data)
        stored.update(data)

    for index in range(plan.count):
        change = plan.change(index, transfer)
        data = plan.codec.encode(change)
        raw = sum(values.nbytes for values in change.after.values())
        if len(data) > raw + OVERHEAD:
            raise NotApplicable(f"{len(data):,} bytes for {raw:,} of values")
        kept = _decoded(plan, data, change, where) if check or not lossless else dict(change.after)
        if lossless and not _same(kept, change.after):
            raise RuntimeError(f"codec {plan.codec.name} does not give back what it was given: {where}, chunk {index}")
        if not lossless and (broken := plan.codec.broken(change, kept)) is not None:
            raise RuntimeError(f"codec {plan.codec.name} does not keep its promise: {where}, chunk {index}: {broken}")
        for state, values in kept.items():
            digests[state].update(as_bytes(values).data)
            if not lossless:
                measures[state].note(change.after[state], values, change.before.get(state))
        if copy is not None and copied is not None and MASTER in kept:
            approximate = None if lossless else kept[MASTER].reshape(-1)
            copy.compare(plan.box(index), change.after[MASTER].reshape(-1), transfer, copied, approximate)
        write(data)
        directory[index] = len(data), joint_digest(kept)
        nbytes += len(data)
    filling = -nbytes % ALIGNMENT
    write(bytes(filling))
    write(directory.tobytes())
    states = {
        state: State(
            tensor.dtype.name,
            plan.shape,
            hash_text(digests[state].intdigest()),
            loss=measures[state].loss(plan.codec.promised(state, plan.form)),
        )
        for state, tensor in plan.after.items()
    }
    total = nbytes + filling + directory.nbytes
    names, before = tuple(plan.after), tuple(state for state in plan.after if state in plan.before)
    config = plan.codec.config()
    return Delta(config, names, before, plan.chunk, at, total, hash_text(stored.intdigest())), states


def _drafts(parameter: Parameter, against: Against, transfer: Transfer) -> Iterator[Plan]:
    """The ways to store a parameter as a delta, the best first, with a codec that is yet to be fitted."""
    shape = parameter.weight.shape
    chunk = _chunk_shape(shape, against.earlier)
    joint = {state: flat(tensor) for state, tensor in parameter.states.items() if tensor.shape == shape}
    nbytes = prod(chunk) * sum(tensor.dtype.itemsize for tensor in joint.values())
    if not prod(shape) or nbytes > MOST_JOINT or parameter.role == "extra":
        return
    samples = _samples(chunk_count(shape, chunk))
    if Copy.of(parameter) is not None and _is_rounded(parameter, chunk, samples, transfer):
        joint.pop(MODEL, None)
    floats = {state: tensor for state, tensor in joint.items() if is_float(tensor.dtype)}
    # What a lossy codec is given it may change: integers, truth values and counts are no matter of degree.
    degrees = {state: tensor for state, tensor in floats.items() if state != _COUNT}
    lossless = (joint, floats) if floats.keys() < joint.keys() else (joint,)
    for after in lossless if against.codec.lossless else (degrees,):
        before = _before(after, shape, against.earlier)
        if after and (against.earlier is None or before):
            yield Plan(after, before, against.codec, chunk, shape)


def _samples(count: int) -> list[int]:
    """The chunks that tell of all."""
    return sorted({0, count // 2})


def _kept(change: Change) -> Change:
    """In arrays of its own."""
    return Change(*({state: values.copy() for state, values in s.items()} for s in (change.before, change.after)))


def _chunk_shape(shape: Shape, earlier: Parameter | None) -> Shape:
    """As the parent's delta is cut, if it has one: a chunk is replayed as a chunk."""
    for tensor in () if earlier is None else earlier.states.values():
        blob = tensor.fragments[0].blob if tensor.fragments else None
        if isinstance(blob, Replayed) and blob.shape == shape:
            return blob.replay.chunk
    return chunk_shape(shape)


def _before(after: Mapping[str, Tensor], shape: Shape, earlier: Parameter | None) -> dict[str, Tensor]:
    known = {} if earlier is None else earlier.states
    fitting = {state: known[state] for state in after if state in known}
    return {
        state: flat(tensor)
        for state, tensor in fitting.items()
        if tensor.shape == shape and tensor.dtype == after[state].dtype
    }


def _is_rounded(parameter: Parameter, chunk: Shape, samples: list[int], transfer: Transfer) -> bool:
    master, copy = (flat(parameter.states[state]) for state in (MASTER, MODEL))
    for index in samples:
        box = Box((index * prod(chunk),), (min((index + 1) * prod(chunk), master.size),))
        values = transfer.fetch(copy, box, "copy", counted=False)
        try:
            Rounded().encode(values, transfer.fetch(master, box, counted=False))
        except NotApplicable:
            return False
    return True


def _alone(parameter: Parameter, state: str, coding: Coding, transfer: Transfer) -> float:
    """Bytes for each raw one if a state is coded without the parent, told from two of its chunks."""
    tensor = parameter.states[state]
    each = prod(chunk_shape(tensor.shape))
    samples = sorted({0, -(-tensor.size // each) // 2})
    choice = choose_for(parameter, state, coding, transfer, samples)
    raw = sum(min(each, tensor.size - index * each) for index in samples) * tensor.dtype.itemsize
    return 1.0 if choice is None else choice.nbytes / raw


def _decoded(plan: Plan, data: bytes, change: Change, where: str) -> dict[str, Array]:
    form = {state: values.dtype for state, values in change.after.items()}
    shape = next(iter(change.after.values())).shape
    try:
        made = plan.codec.decode(data, change.before, shape, form)
    except CodecError as error:
        raise Unsupported(f"codec {plan.codec.name} cannot decode what it encoded: {error}", where=where) from None
    return {state: np.ascontiguousarray(made[state]) for state in change.after}


def _same(kept: Mapping[str, Array], true: Mapping[str, Array]) -> bool:
    return all(np.array_equal(as_bytes(kept[state]), as_bytes(values)) for state, values in true.items())
