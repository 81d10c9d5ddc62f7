"""The file of one parameter: its states, one after another, in one safetensors file."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np
import xxhash

from ckpt_codecs import NotApplicable
from ckpt_formats.containers.safetensors import TensorSlot, header_bytes
from ckpt_formats.containers.sealed_json import hash_text
from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.dtypes import DTYPES, SAFETENSORS_TAGS
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.files import write_all
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.universal.delta_plan import DeltaBase, DeltaPlan, plan_delta
from ckpt_formats.universal.encode_state import choose, write_coded
from ckpt_formats.universal.entry import ParameterEntry, StateEntry
from ckpt_formats.universal.manifest import VERSION
from ckpt_formats.universal.model_copy import ModelCopy
from ckpt_formats.universal.read_states import DELTA
from ckpt_formats.universal.write_delta import write_delta
from ckpt_formats.universal.write_replayed import spill_states, stored_delta_of, write_together

_SLOT_RESERVE = 64
"""Bytes by which the header entry of a coded state may be longer than that of the plain state."""


def write_parameter(
    folder: Path,
    file: str,
    parameter: Parameter,
    transfer: Transfer,
    coding: EncodingOptions | None = None,
    against: DeltaBase | None = None,
) -> ParameterEntry:
    """Write all states, in slabs or in coded chunks. The model's copy is not stored if it is the rounded master.

    With `against`, states that become smaller as a delta are written as one.
    Only at the end it is known whether the copy is the rounded master, and what coding saves. So the header has
    space for the entries of all states, and the bytes of the copy, if it needs any, are written last.
    """
    if against is not None and DELTA not in parameter.states:
        plan = plan_delta(parameter, against, coding or EncodingOptions(), transfer)
        if plan is not None:
            try:
                return _write(folder, file, parameter, transfer, coding or EncodingOptions(), plan)
            except NotApplicable:  # although the codec could encode the sampled chunks
                pass
    if coding is None:
        return _write(folder, file, parameter, transfer, None, None)
    with _readable(folder / file, parameter, transfer) as source:
        return _write(folder, file, source, transfer, coding, None)


def _write(
    folder: Path,
    file: str,
    parameter: Parameter,
    transfer: Transfer,
    coding: EncodingOptions | None,
    plan: DeltaPlan | None,
) -> ParameterEntry:
    in_delta = () if plan is None else tuple(plan.after)
    copy = None if MODEL in in_delta else ModelCopy.of(parameter)
    order = sorted(parameter.states, key=lambda state: copy is not None and state == MODEL)
    slots = _slots((state, parameter.states[state]) for state in order)
    reserve = _SLOT_RESERVE * len(slots) if coding is not None else 0
    header_nbytes = len(header_bytes(slots, _metadata(parameter))) + reserve
    # A state that is stored alone is read without the delta, so its base must not be in the delta.
    alone = {state: tensor for state, tensor in parameter.states.items() if state not in in_delta}
    alone_parameter = replace(parameter, states=alone)
    written: dict[str, StateEntry] = {}
    delta = None
    with (folder / file).open("wb", buffering=0) as out:
        out.seek(header_nbytes)
        if plan is not None and coding is not None:
            delta, written = write_delta(out, plan, copy, coding.check, transfer, f"tensor {printable(parameter.name)}")
        elif coding is None and (replay := stored_delta_of(parameter)) is not None:
            written = write_together(out, header_nbytes, slots, parameter, replay, copy, transfer)
        for slot in (slot for slot in slots if slot.name in alone and slot.name not in written):
            if coding is None:
                out.seek(header_nbytes + slot.offset)
            if slot.name == MODEL and copy is not None and copy.derived:
                written[MODEL] = copy.state()
                continue
            copy_of_slot = copy if slot.name == MASTER else None
            choice = None if coding is None else choose(alone_parameter, slot.name, coding, transfer)
            if coding is None or choice is None:
                written[slot.name] = _write_state(out, slot, alone[slot.name], transfer, copy_of_slot)
            else:
                passing = None if copy_of_slot is None else copy_of_slot.passing(transfer)
                written[slot.name] = write_coded(
                    out, alone_parameter, slot.name, choice, coding.check, transfer, passing
                )
        ordered = {name: written[name] for name in parameter.states}
        entry = ParameterEntry(parameter.name, parameter.role, file, 0, "", ordered, parameter.values, delta)
        header = header_bytes(_stored_slots(entry, header_nbytes), _metadata(parameter), header_nbytes)
        assert len(header) == header_nbytes, "the header is longer than the space for it"
        os.pwrite(out.fileno(), header, 0)
        nbytes = os.fstat(out.fileno()).st_size
    return replace(entry, nbytes=nbytes, header=hash_text(xxhash.xxh3_128_intdigest(header)))


@contextmanager
def _readable(path: Path, parameter: Parameter, transfer: Transfer) -> Iterator[Parameter]:
    """The parameter, with states that can be read one after another without a replay of the deltas for each."""
    replay = stored_delta_of(parameter)
    if replay is None or replay.chunking.count < 2:
        yield parameter
        return
    spill = path.with_suffix(".replayed")
    try:
        yield spill_states(spill, parameter, replay, transfer)
    finally:
        spill.unlink(missing_ok=True)


def check_storable(parameter: Parameter) -> None:
    """Raise `Unsupported` for states that a safetensors file cannot store."""
    for state, tensor in parameter.states.items():
        if tensor.dtype.name not in SAFETENSORS_TAGS:
            raise Unsupported(
                f"tensor `{printable(parameter.name)}`: its state `{printable(state)}` is of type "
                f"{tensor.dtype.name}, which "
                "safetensors, and so the universal format, does not have",
                hint="Leave the tensor out with --skip, or convert to torch.",
            )
    header_bytes(_slots(parameter.states.items()), {})


def _write_state(
    out: FileIO, slot: TensorSlot, tensor: Tensor, transfer: Transfer, copy: ModelCopy | None = None
) -> StateEntry:
    digest, offset = xxhash.xxh3_128(), out.tell()
    for box, values in transfer.slabs(tensor):
        write_all(out, as_bytes(values).data)
        digest.update(as_bytes(values).data)
        if copy is not None:
            copy.compare(box, values, transfer, copy.tensor)
    text = hash_text(digest.intdigest())
    return StateEntry(slot.dtype.name, slot.shape, text, None, None, offset, slot.nbytes, text)


def _metadata(parameter: Parameter) -> dict[str, str]:
    """The metadata of the header, for people: the version of the format, and the name of the parameter."""
    return {
        "ckpt": f"universal {VERSION}",
        "parameter": parameter.name.encode("utf-8", "backslashreplace").decode(),
    }


def _stored_slots(entry: ParameterEntry, header_nbytes: int) -> list[TensorSlot]:
    """The entries of the header for what is stored, by offset. Coded states and deltas are tensors of uint8."""
    slots = []
    for name, state in entry.states.items():
        if state.offset is not None and state.chunk is None:
            slots.append(TensorSlot(name, DTYPES[state.dtype], state.shape, state.offset - header_nbytes))
        elif state.offset is not None:
            slots.append(TensorSlot(name, np.dtype(np.uint8), (state.nbytes,), state.offset - header_nbytes))
    if entry.delta is not None:
        slots.append(TensorSlot(DELTA, np.dtype(np.uint8), (entry.delta.nbytes,), entry.delta.offset - header_nbytes))
    return sorted(slots, key=lambda slot: slot.offset)


def _slots(states: Iterable[tuple[str, Tensor]]) -> list[TensorSlot]:
    slots, at = [], 0
    for name, tensor in states:
        slots.append(TensorSlot(name, tensor.dtype, tensor.shape, at))
        at += slots[-1].nbytes
    return slots
