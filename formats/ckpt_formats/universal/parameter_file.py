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
from ckpt_formats.universal.model_copy import ModelCopy
from ckpt_formats.universal.read_states import DELTA
from ckpt_formats.universal.write_delta import write_delta
from ckpt_formats.universal.write_replayed import spill_states, stored_delta_of, write_together

_ROOM = 64
"""Bytes by which the entry of a coded state may be longer in the header than that of its values."""


def write_parameter(
    folder: Path,
    file: str,
    parameter: Parameter,
    transfer: Transfer,
    coding: EncodingOptions | None = None,
    against: DeltaBase | None = None,
) -> ParameterEntry:
    """Write all states, in slabs or coded chunks. The model's copy is left out if it is the master, rounded.

    With `against`, the states that are smaller so are written as a delta.
    Whether a copy is rounded shows only at the end, as does what coding saves: so
    the header keeps room for all, and the copy's bytes, if it needs any, come last.
    """
    if against is not None and DELTA not in parameter.states:
        plan = plan_delta(parameter, against, coding or EncodingOptions(), transfer)
        if plan is not None:
            try:
                return _write(folder, file, parameter, transfer, coding or EncodingOptions(), plan)
            except NotApplicable:  # though the codec held the chunks that were tried
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
    inside = () if plan is None else tuple(plan.after)
    copy = None if MODEL in inside else ModelCopy.of(parameter)
    order = sorted(parameter.states, key=lambda state: copy is not None and state == MODEL)
    raw = _slots((state, parameter.states[state]) for state in order)
    room = len(header_bytes(raw, _metadata(parameter, 1))) + (_ROOM * len(raw) if coding is not None else 0)
    # What is stored alone is read alone, so no base of it may be in the delta.
    alone = {state: tensor for state, tensor in parameter.states.items() if state not in inside}
    known = replace(parameter, states=alone)
    written: dict[str, StateEntry] = {}
    delta = None
    with (folder / file).open("wb", buffering=0) as out:
        out.seek(room)
        if plan is not None and coding is not None:
            delta, written = write_delta(out, plan, copy, coding.check, transfer, f"tensor {printable(parameter.name)}")
        elif coding is None and (replay := stored_delta_of(parameter)) is not None:
            written = write_together(out, room, raw, parameter, replay, copy, transfer)
        for slot in (slot for slot in raw if slot.name in alone and slot.name not in written):
            if coding is None:
                out.seek(room + slot.offset)
            if slot.name == MODEL and copy is not None and copy.derived:
                written[MODEL] = copy.state()
                continue
            beside = copy if slot.name == MASTER else None
            choice = None if coding is None else choose(known, slot.name, coding, transfer)
            if coding is None or choice is None:
                written[slot.name] = _write_state(out, slot, known.states[slot.name], transfer, beside)
            else:
                passing = None if beside is None else beside.passing(transfer)
                written[slot.name] = write_coded(out, known, slot.name, choice, coding.check, transfer, passing)
        ordered = {name: written[name] for name in parameter.states}
        entry = ParameterEntry(parameter.name, parameter.role, file, 0, "", ordered, parameter.values, delta)
        head = header_bytes(_stored_slots(entry, room), _metadata(parameter, entry.version), room)
        assert len(head) == room, "the header outgrew its room"
        os.pwrite(out.fileno(), head, 0)
        nbytes = os.fstat(out.fileno()).st_size
    return replace(entry, nbytes=nbytes, header=hash_text(xxhash.xxh3_128_intdigest(head)))


@contextmanager
def _readable(path: Path, parameter: Parameter, transfer: Transfer) -> Iterator[Parameter]:
    """The parameter, in a form in which its states can be read one after another without replaying each."""
    replay = stored_delta_of(parameter)
    if replay is None or replay.chunking.count < 2:
        yield parameter
        return
    beside = path.with_suffix(".replayed")
    try:
        yield spill_states(beside, parameter, replay, transfer)
    finally:
        beside.unlink(missing_ok=True)


def check_storable(parameter: Parameter) -> None:
    """Raises `Unsupported` for states that a safetensors file cannot hold."""
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
    digest, at = xxhash.xxh3_128(), out.tell()
    for box, values in transfer.slabs(tensor):
        write_all(out, as_bytes(values).data)
        digest.update(as_bytes(values).data)
        if copy is not None:
            copy.compare(box, values, transfer, copy.tensor)
    text = hash_text(digest.intdigest())
    return StateEntry(slot.dtype.name, slot.shape, text, None, None, at, slot.nbytes, text)


def _metadata(parameter: Parameter, version: int) -> dict[str, str]:
    """For people: the version whose readers understand the file, and whose it is."""
    return {
        "ckpt": f"universal {version}",
        "parameter": parameter.name.encode("utf-8", "backslashreplace").decode(),
    }


def _stored_slots(entry: ParameterEntry, room: int) -> list[TensorSlot]:
    """What is stored, as safetensors has it: coded bytes are bytes."""
    slots = []
    for name, state in entry.states.items():
        if state.offset is not None and state.chunk is None:
            slots.append(TensorSlot(name, DTYPES[state.dtype], state.shape, state.offset - room))
        elif state.offset is not None:
            slots.append(TensorSlot(name, np.dtype(np.uint8), (state.nbytes,), state.offset - room))
    if entry.delta is not None:
        slots.append(TensorSlot(DELTA, np.dtype(np.uint8), (entry.delta.nbytes,), entry.delta.offset - room))
    return sorted(slots, key=lambda slot: slot.offset)


def _slots(states: Iterable[tuple[str, Tensor]]) -> list[TensorSlot]:
    slots, at = [], 0
    for name, tensor in states:
        slots.append(TensorSlot(name, tensor.dtype, tensor.shape, at))
        at += slots[-1].nbytes
    return slots
