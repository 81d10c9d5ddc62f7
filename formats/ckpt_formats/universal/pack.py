"""Write a pack: the states of several parameters, one after another, in one safetensors file."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from ckpt_codecs import NotApplicable
from ckpt_formats.containers.safetensors import TensorSlot, header_bytes
from ckpt_formats.containers.sealed_json import hash_text
from ckpt_formats.core.checkpoint import MODEL, ErrorFigures, Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DTYPES, NAMES, SAFETENSORS_TAGS
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.errors import UnsupportedError, at_tensor
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import STORED_MODEL
from ckpt_formats.core.tensor import Array, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import SLAB, Transfer, as_bytes
from ckpt_formats.universal.check_index import Pack
from ckpt_formats.universal.chunked import ChunkDigests, chunk_digests
from ckpt_formats.universal.delta_plan import DeltaBase, DeltaPlan, plan_delta
from ckpt_formats.universal.encode_state import choose, flat, write_coded
from ckpt_formats.universal.entry import DELTA, DeltaEntry, Extent, ParameterEntry, StateEntry
from ckpt_formats.universal.manifest import VERSION
from ckpt_formats.universal.model_copy import ModelCopy, has_copy, possible_masters
from ckpt_formats.universal.pack_file import Mark, PackFile, PlacedStates
from ckpt_formats.universal.pack_headers import SlotNames
from ckpt_formats.universal.unchanged import EarlierMember, SharedStates
from ckpt_formats.universal.write_delta import write_delta
from ckpt_formats.universal.write_replayed import (
    are_written_together,
    is_aligned,
    replays_of_boxes,
    spill_boxes,
    spill_states,
    stored_delta_of,
    write_together,
)

_SLOT_NBYTES = 64
"""Bytes of an entry in the header, without its name, shape and offsets, are fewer than this."""
_SLOT_RESERVE = 64
"""Bytes by which the header entry of an encoded state may be longer than that of the plain state."""
_SMALL_NBYTES = 1 << 20
"""Bytes of a state that is read at once."""
_MAX_STATE_NAMES = 1 << 16
"""As many as the column `state.name` of the index can number."""
PAGE = 4096
"""The data of a pack begins at a multiple of this."""
_METADATA = {"ckpt": f"universal {VERSION}"}


@dataclass(frozen=True)
class WrittenPack:
    """A pack that was written."""

    pack: Pack
    entries: tuple[ParameterEntry, ...]


@dataclass(frozen=True)
class _Draft:
    """A parameter of the pack, as far as it is written."""

    parameter: Parameter
    copy: ModelCopy | None
    delta: DeltaEntry | None
    written: dict[str, StateEntry]

    @property
    def alone(self) -> Parameter:
        """The parameter without the states of its delta. A state that is stored alone is read without the delta."""
        in_delta = () if self.delta is None else self.delta.states
        states = {state: tensor for state, tensor in self.parameter.states.items() if state not in in_delta}
        return replace(self.parameter, states=states)

    @property
    def _master(self) -> Tensor:
        assert self.copy is not None
        return self.parameter.states[self.copy.base]

    def remaining(self, copies: bool, aligned: bool) -> list[str]:
        """The states that are still to be written. A copy comes after its master, so it is aligned only as that is."""
        return [
            state
            for state, tensor in self.parameter.states.items()
            if state not in self.written
            and (self.copy is not None and state == MODEL) == copies
            and (is_aligned(tensor) and (not copies or is_aligned(self._master))) == aligned
        ]


def write_pack(
    path: Path,
    number: int,
    parameters: Sequence[Parameter],
    transfer: Transfer,
    coding: EncodingOptions | None = None,
    bases: Mapping[str, DeltaBase] | None = None,
    errors: Mapping[tuple[str, str], ErrorFigures] | None = None,
    earlier: EarlierMember | None = None,
    placed: tuple[Path, Extent] | None = None,
) -> WrittenPack:
    """Write all states: plain, in encoded chunks, or as deltas, for parameters in `bases`, where these are smaller.

    States that are equal in the `earlier` member of the chain are not written: their entries name its packs.

    The order is that of the parameters and their states; then the model's copies; then, in this order again, states
    and copies whose length is no multiple of 8, the largest elements first. A copy is not stored if it is the rounded
    master, which is known only when the master was written. `errors`: the figures of states that were approximate
    before. `placed`: the single file and the range in it where those in `placed_states` are written, not to `path`.
    """
    with ExitStack() as stack:
        # A spill has the same name when an interrupted command is run again, so that no file stays.
        spills = [path.with_suffix(f".{place}.replayed") for place in range(len(parameters))]
        readable: Iterator[Parameter] = (
            stack.enter_context(_readable(spill, parameter, coding, transfer))
            for spill, parameter in zip(spills, parameters, strict=True)
        )
        shared: SharedStates = {}
        if earlier is not None:
            own = list(readable)
            shared, readable = _shared(own, earlier, bases or {}, coding, transfer), iter(own)
        out = stack.enter_context(
            PackFile(path, number, header_nbytes(parameters, coding, shared), transfer.is_flushed)
        )
        single = None if placed is None else stack.enter_context(PlacedStates(*placed))
        writer = StatesWriter(out, transfer, coding, recognise_masters=earlier is None and not bases)
        for original, parameter in zip(parameters, readable, strict=True):
            base = (bases or {}).get(parameter.name)
            at_once = () if single is None else placed_states(original)
            writer.add(parameter, base, shared.get(parameter.name, {}), placed=at_once, single=single)
        return finish_pack(out, writer.finish(errors or {}))


class StatesWriter:
    """Writes the states of parameters one after another into a pack."""

    def __init__(
        self, out: PackFile, transfer: Transfer, coding: EncodingOptions | None, recognise_masters: bool = False
    ) -> None:
        self._out = out
        self._recognise_masters = recognise_masters
        self._transfer = transfer
        self._coding = coding
        self._drafts: list[_Draft] = []

    def add(
        self,
        parameter: Parameter,
        base: DeltaBase | None = None,
        shared: Mapping[str, StateEntry] = {},
        plan: DeltaPlan | None = None,
        placed: Sequence[str] = (),
        single: PackFile | None = None,
    ) -> DeltaEntry | None:
        """Write a parameter, but for the states that come last, and return its delta, if it has one.

        `shared`: the states that are not stored. `plan`: how it is stored as a delta, if that is known already.
        `placed`: the states that lie in the file `single`.
        """
        with at_tensor(printable(parameter.name)):
            draft = _begin(self._out, parameter, self._transfer, self._coding, base, shared, plan)
            if self._recognise_masters and draft.copy is None and not draft.written:
                draft = replace(draft, copy=ModelCopy.recognised(parameter, self._transfer))
        self._drafts.append(draft)
        for state in draft.remaining(copies=False, aligned=True):
            self._write(draft, state, single if state in placed else None)
        return draft.delta

    def undo(self, mark: Mark) -> None:
        """Remove the parameter that was written last. `mark`: the end of the pack before."""
        self._out.rollback(mark)
        self._drafts.pop()

    def finish(self, errors: Mapping[tuple[str, str], ErrorFigures]) -> tuple[ParameterEntry, ...]:
        """Write what is left. Returns the entries of all parameters."""
        for copies, aligned in ((True, True), (False, False), (True, False)):
            late = [(draft, state) for draft in self._drafts for state in draft.remaining(copies, aligned)]
            if not aligned:
                late.sort(key=lambda item: -item[0].parameter.states[item[1]].dtype.itemsize)
            for draft, state in late:
                self._write(draft, state)
        return tuple(_entry(draft, errors) for draft in self._drafts)

    def _write(self, draft: _Draft, state: str, out: PackFile | None = None) -> None:
        _write_state(out or self._out, draft, state, self._transfer, self._coding)


def finish_pack(out: PackFile, entries: Sequence[ParameterEntry]) -> WrittenPack:
    """Write the header of a pack, when all its states are written."""
    stored = [
        replace(entry, states={name: state for name, state in entry.states.items() if _is_in(state, out.number)})
        for entry in entries
    ]
    header = header_bytes(stored_slots(stored, out.header_nbytes), _METADATA, out.header_nbytes)
    out.finish(header)
    header_hash = hash_text(xxhash.xxh3_128_intdigest(header))
    return WrittenPack(Pack(out.position, out.header_nbytes, header_hash), tuple(entries))


def _is_in(state: StateEntry, number: int) -> bool:
    return state.extent is not None and state.extent.pack == number


def placed_states(parameter: Parameter) -> list[str]:
    """The states whose place in a single file is known before they are written, if none is encoded: in their order.

    Not copies, which may not be stored; none of what is replayed, since it is written in another order; and none after
    which others would not be aligned.
    """
    if stored_delta_of(parameter) is not None or replays_of_boxes(parameter):
        return []
    copy = MODEL if has_copy(parameter) or possible_masters(parameter) else None
    return [state for state, tensor in parameter.states.items() if state != copy and is_aligned(tensor)]


def check_storable(parameter: Parameter) -> None:
    """Raise `UnsupportedError` for states that a safetensors file cannot store."""
    for state, tensor in parameter.states.items():
        if tensor.dtype.name not in SAFETENSORS_TAGS:
            raise UnsupportedError(
                f"tensor `{printable(parameter.name)}`: its state `{printable(state)}` is of type "
                f"{tensor.dtype.name}, which "
                "safetensors, and so the universal format, does not have",
                hint="Leave the tensor out with --skip, or convert to torch.",
            )


def check_state_names(parameters: Iterable[Parameter]) -> None:
    """Raise `UnsupportedError` for more names of states than the index can number."""
    if len({state for parameter in parameters for state in parameter.states}) > _MAX_STATE_NAMES:
        raise UnsupportedError(
            f"more than {_MAX_STATE_NAMES:,} names of states, which the universal format cannot number",
            hint="Leave tensors out with --skip, or convert to torch.",
        )


def _begin(
    out: PackFile,
    parameter: Parameter,
    transfer: Transfer,
    coding: EncodingOptions | None,
    base: DeltaBase | None,
    shared: Mapping[str, StateEntry],
    plan: DeltaPlan | None = None,
) -> _Draft:
    """The parameter, with what is written of several states at once: those of a delta, and those of a replay.

    `shared`: the states that are not stored.
    """
    if shared:
        return _Draft(parameter, None if MODEL in shared else ModelCopy.of(parameter), None, dict(shared))
    if base is not None and DELTA not in parameter.states:
        options = coding or EncodingOptions()
        plan = plan or plan_delta(parameter, base, options, transfer)
        if plan is not None:
            mark = out.mark()
            try:
                return _as_delta(out, parameter, plan, options, transfer)
            except NotApplicable:  # although the codec could encode the sampled chunks
                out.rollback(mark)
    copy = ModelCopy.of(parameter)
    replay = stored_delta_of(parameter) if coding is None else None
    written = {} if replay is None else write_together(out, parameter, replay, copy, transfer)
    return _Draft(parameter, copy, None, written)


def _as_delta(
    out: PackFile, parameter: Parameter, plan: DeltaPlan, coding: EncodingOptions, transfer: Transfer
) -> _Draft:
    copy = None if STORED_MODEL in plan.after else ModelCopy.of(parameter)
    where = f"tensor {printable(parameter.name)}"
    delta, written = write_delta(out, plan, copy, coding.check, transfer, where)
    return _Draft(parameter, copy, delta, written)


def _write_state(out: PackFile, draft: _Draft, state: str, transfer: Transfer, coding: EncodingOptions | None) -> None:
    with at_tensor(printable(draft.parameter.name)):
        _write_values(out, draft, state, transfer, coding)


def _write_values(out: PackFile, draft: _Draft, state: str, transfer: Transfer, coding: EncodingOptions | None) -> None:
    copy, tensor = draft.copy, draft.parameter.states[state]
    if state == MODEL and copy is not None and copy.derived:
        draft.written[MODEL] = copy.state()
        return
    follower = copy if copy is not None and state == copy.base else None
    alone = draft.parameter if coding is None else draft.alone
    choice = None if coding is None else choose(alone, state, coding, transfer)
    if coding is None or choice is None:
        draft.written[state] = _write_plain(out, tensor, transfer, follower)
    else:
        if follower is not None and choice.base is not None:
            follower.derived = False  # a base has no base itself
        passing = None if follower is None else follower.passing(transfer)
        draft.written[state] = write_coded(out, alone, state, choice, coding.check, transfer, passing)


def _write_plain(out: PackFile, tensor: Tensor, transfer: Transfer, copy: ModelCopy | None = None) -> StateEntry:
    start = out.position
    if tensor.nbytes <= _SMALL_NBYTES:
        values = transfer.whole(tensor)
        out.write(as_bytes(values).data)
        if copy is not None:
            copy.compare_whole(values, transfer)
        return StateEntry(NAMES[tensor.dtype], tensor.shape, chunk_digests(values), out.since(start))
    chunking, digests = Chunking.default(tensor.shape), ChunkDigests(tensor)
    vector, copied = flat(tensor), None if copy is None else flat(copy.tensor)
    step = max(1, SLAB // (chunking.chunk_size * max(tensor.dtype.itemsize, 4))) * chunking.chunk_size

    def blocks() -> Iterator[Array]:
        for first in range(0, tensor.size, step):
            box = Box((first,), (min(first + step, tensor.size),))
            values = transfer.fetch(vector, box)
            if copy is not None and copied is not None:
                copy.compare(box, values, transfer, copied)
            yield values

    with transfer.ahead(blocks(), lambda values: True) as computed:
        for values in computed:
            out.write(as_bytes(values).data)
            digests.add(values)
    return StateEntry(NAMES[tensor.dtype], tensor.shape, digests.digests(), out.since(start))


def _entry(draft: _Draft, errors: Mapping[tuple[str, str], ErrorFigures]) -> ParameterEntry:
    """The entry of a parameter, with the error figures of its source for states that have none of their own."""
    parameter, states = draft.parameter, {name: draft.written[name] for name in draft.parameter.states}
    for name, state in states.items():
        if state.error is None and (parameter.name, name) in errors:
            states[name] = replace(state, error=errors[parameter.name, name])
    return ParameterEntry(parameter.name, parameter.role, states, parameter.values, draft.delta)


@contextmanager
def _readable(
    spill: Path, parameter: Parameter, coding: EncodingOptions | None, transfer: Transfer
) -> Iterator[Parameter]:
    """The parameter, with states that can be written one after another without a replay of the deltas for each.

    Where they are not all written at once, they are at `spill` while the block runs.
    """
    boxes = replays_of_boxes(parameter)
    if boxes:
        try:
            yield spill_boxes(spill, parameter, boxes, transfer)
        finally:
            spill.unlink(missing_ok=True)
        return
    replay = stored_delta_of(parameter)
    at_once = coding is None and replay is not None and are_written_together(parameter, replay)
    if replay is None or replay.chunking.count < 2 or at_once:
        yield parameter
        return
    try:
        yield spill_states(spill, parameter, replay, transfer)
    finally:
        spill.unlink(missing_ok=True)


def _shared(
    parameters: Sequence[Parameter],
    earlier: EarlierMember,
    bases: Mapping[str, DeltaBase],
    coding: EncodingOptions | None,
    transfer: Transfer,
) -> SharedStates:
    """The states that the earlier member has, too. Of those that would be in a delta, all of a parameter or none."""
    check = coding is None or coding.check
    shared = earlier.shared(parameters, frozenset(bases), check, transfer)
    transfer.count(sum(p.states[state].nbytes for p in parameters for state in shared.get(p.name, {})))
    return shared


def header_nbytes(parameters: Sequence[Parameter], coding: EncodingOptions | None, shared: SharedStates) -> int:
    """The space for the header: enough for all states that may be stored, wherever they will be, so each as if it came
    last."""
    reserve = _SLOT_RESERVE if coding is not None else 0
    names, nbytes = SlotNames(), len(header_bytes((), _METADATA))
    offset_digits = len(str(sum(parameter.nbytes for parameter in parameters)))
    for parameter in parameters:
        for state, tensor in parameter.states.items():
            if state in shared.get(parameter.name, {}):
                continue
            name = len(json.dumps(names.add(parameter.name, state)))
            nbytes += name + len(str(tensor.shape)) + 2 * offset_digits + _SLOT_NBYTES + reserve
    return -(-nbytes // PAGE) * PAGE


def stored_slots(entries: Sequence[ParameterEntry], begin: int) -> list[TensorSlot]:
    """The entries of the header for what is stored, by offset. Encoded states and deltas are tensors of uint8."""
    slots, names = [], SlotNames()
    for entry in entries:
        for name, state in entry.states.items():
            if state.extent is None:
                continue
            dtype, shape = (DTYPES[state.dtype], state.shape)
            if state.chunks is not None:
                dtype, shape = np.dtype(np.uint8), (state.extent.nbytes,)
            slots.append(TensorSlot(names.add(entry.name, name), dtype, shape, state.extent.offset - begin))
        if entry.delta is not None:
            extent = entry.delta.extent
            text = names.add(entry.name, DELTA)
            slots.append(TensorSlot(text, np.dtype(np.uint8), (extent.nbytes,), extent.offset - begin))
    return sorted(slots, key=lambda slot: (slot.offset, slot.nbytes))
