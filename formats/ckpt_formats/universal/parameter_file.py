"""The file of one parameter: its states, one after another, in one safetensors file."""

import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ckpt_codecs import Codec, CodecError, NotApplicable, Rounded, from_config
from ckpt_formats.base import MASTER, MODEL, Parameter
from ckpt_formats.coded import Coded, Store
from ckpt_formats.coding import Coding
from ckpt_formats.dtypes import DTYPES
from ckpt_formats.errors import Unsupported
from ckpt_formats.files import Seal, write_all
from ckpt_formats.geometry import Box
from ckpt_formats.safetensors_file import Slot, header_bytes
from ckpt_formats.tensor import Array, Blob, Decoded, Raw, Tensor
from ckpt_formats.transfer import Transfer, as_bytes
from ckpt_formats.universal.coded_state import Passing, choose, flat, write_coded
from ckpt_formats.universal.manifest import Entry, State, hash_number, hash_text

_ROOM = 64
"""Bytes by which the entry of a coded state may be longer in the header than that of its values."""


def write_parameter(
    folder: Path, file: str, parameter: Parameter, transfer: Transfer, coding: Coding | None = None
) -> Entry:
    """Write all states, in slabs or coded chunks. The model's copy is left out if it is the master, rounded.

    Whether it is shows only at the end, as does what coding saves: so the
    header keeps room for all, and the copy's bytes, if it needs any, come last.
    """
    states = dict(parameter.states)
    master = states.get(MASTER)
    copy = None
    if master is not None and MODEL in states and states[MODEL].shape == master.shape:
        copy = _Copy(states.pop(MODEL), master)
    raw = _slots([*states.items(), *([(MODEL, copy.tensor)] if copy is not None else [])])
    room = len(header_bytes(raw, _metadata(parameter, None))) + (_ROOM * len(raw) if coding is not None else 0)
    written: dict[str, State] = {}
    with (folder / file).open("wb", buffering=0) as out:
        out.seek(room)
        for slot in raw:
            if slot.name == MODEL and copy is not None and copy.derived:
                written[MODEL] = copy.state()
                continue
            beside = copy if slot.name == MASTER else None
            choice = None if coding is None else choose(parameter, slot.name, coding, transfer)
            if coding is None or choice is None:
                written[slot.name] = _write_state(out, slot, parameter.states[slot.name], transfer, beside)
            else:
                passing = None if beside is None else beside.passing(transfer)
                written[slot.name] = write_coded(out, parameter, slot.name, choice, coding.check, transfer, passing)
        slots = [_slot(name, state, room) for name, state in written.items() if state.offset is not None]
        head = header_bytes(slots, _metadata(parameter, written), room)
        assert len(head) == room, "the header outgrew its room"
        os.pwrite(out.fileno(), head, 0)
        nbytes = os.fstat(out.fileno()).st_size
    header = hash_text(xxhash.xxh3_128_intdigest(head))
    ordered = {name: written[name] for name in parameter.states}
    return Entry(parameter.name, parameter.role, file, nbytes, header, ordered, parameter.values)


def check_storable(parameter: Parameter) -> None:
    """Raises `Unsupported` for states that a safetensors file cannot hold."""
    header_bytes(_slots(parameter.states.items()), {})


def read_states(path: Path, entry: Entry) -> dict[str, Tensor]:
    """The lazy tensors of an entry. Raises `Unsupported` for a codec we do not have."""
    blobs: dict[str, Blob] = {}
    for name, state in sorted(entry.states.items(), key=lambda item: item[1].base is not None):
        blobs[name] = _blob(path, entry, name, state, None if state.base is None else blobs[state.base])
    return {name: Tensor.of(blobs[name]) for name in entry.states}


def _blob(path: Path, entry: Entry, name: str, state: State, base: Blob | None) -> Blob:
    dtype, seal = DTYPES[state.dtype], _seal(path, entry, name, state)
    if state.codec is None and state.offset is not None:
        return Raw.packed(path, state.offset, state.shape, dtype, seal)
    codec = _codec(path, entry, dict(state.codec or {}))
    if state.offset is None or state.chunk is None:
        assert base is not None  # the manifest saw to it
        return Decoded(codec, base, dtype)
    label = f"{entry.name}/{name}"
    return Coded.whole(
        Store(path, state.offset, state.nbytes, state.shape, dtype, state.chunk, codec, label, base, seal)
    )


def _codec(path: Path, entry: Entry, config: dict[str, Any]) -> Codec:
    try:
        return from_config(config)
    except CodecError as error:
        raise Unsupported(f"`{entry.name}`: {error}", where=path) from None


def seals(path: Path, entry: Entry) -> tuple[Seal, ...]:
    """The checksums of all bytes of the file: header and states."""
    begins = min((state.offset for state in entry.states.values() if state.offset is not None), default=entry.nbytes)
    header = Seal(path, 0, begins, "xxh3-128", hash_number(entry.header), f"header of {entry.name}")
    stored = (_seal(path, entry, name, state) for name, state in entry.states.items() if state.offset is not None)
    return (header, *(seal for seal in stored if seal is not None))


class _Copy:
    """The model's copy, held against its master while the master passes by."""

    def __init__(self, tensor: Tensor, master: Tensor) -> None:
        self.tensor = tensor
        self.derived = True
        self._codec = Rounded()
        self._values = xxhash.xxh3_128()
        only = tensor.fragments[0].blob if len(tensor.fragments) == 1 else None
        self._by_definition = isinstance(only, Decoded) and only.codec == self._codec and only.base is master

    def compare(self, box: Box, master: Array, transfer: Transfer, tensor: Tensor) -> None:
        if not self.derived:
            return
        if self._by_definition:
            self.derived = self._codec.holds(master, self.tensor.dtype)
            values = self._codec.decode(b"", master.shape, self.tensor.dtype, master)
        else:
            values = transfer.fetch(tensor, box, "copy")
            try:
                self._codec.encode(values, master)
            except NotApplicable:
                self.derived = False
        self._values.update(as_bytes(values).data)

    def passing(self, transfer: Transfer) -> Passing:
        """For a master that passes by as a vector."""
        copy = flat(self.tensor)
        return lambda box, master: self.compare(box, master, transfer, copy)

    def state(self) -> State:
        digest = hash_text(self._values.intdigest())
        return State(self.tensor.dtype.name, self.tensor.shape, digest, self._codec.config(), MASTER)


def _write_state(out: FileIO, slot: Slot, tensor: Tensor, transfer: Transfer, copy: _Copy | None = None) -> State:
    digest, at = xxhash.xxh3_128(), out.tell()
    for box, values in transfer.slabs(tensor):
        write_all(out, as_bytes(values).data)
        digest.update(as_bytes(values).data)
        if copy is not None:
            copy.compare(box, values, transfer, copy.tensor)
    text = hash_text(digest.intdigest())
    return State(slot.dtype.name, slot.shape, text, None, None, at, slot.nbytes, text)


def _metadata(parameter: Parameter, written: Mapping[str, State] | None) -> dict[str, str]:
    """For people: the version whose readers understand the file, and whose it is."""
    version = 2 if any(state.chunk is not None for state in (written or {}).values()) else 1
    return {
        "ckpt": f"universal {version}",
        "parameter": parameter.name.encode("utf-8", "backslashreplace").decode(),
    }


def _slot(name: str, state: State, room: int) -> Slot:
    """A stored state as safetensors has it: coded bytes are bytes."""
    assert state.offset is not None
    if state.chunk is None:
        return Slot(name, DTYPES[state.dtype], state.shape, state.offset - room)
    return Slot(name, np.dtype(np.uint8), (state.nbytes,), state.offset - room)


def _slots(states: Iterable[tuple[str, Tensor]]) -> list[Slot]:
    slots, at = [], 0
    for name, tensor in states:
        slots.append(Slot(name, tensor.dtype, tensor.shape, at))
        at += slots[-1].nbytes
    return slots


def _seal(path: Path, entry: Entry, name: str, state: State) -> Seal | None:
    if state.offset is None or state.stored is None:
        return None
    return Seal(path, state.offset, state.nbytes, "xxh3-128", hash_number(state.stored), f"{entry.name}/{name}")
