"""The file of one parameter: its states, one after another, in one safetensors file."""

import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import xxhash

from ckpt_codecs import CodecError, NotApplicable, Rounded, from_config
from ckpt_formats.base import MASTER, MODEL, Parameter
from ckpt_formats.dtypes import DTYPES
from ckpt_formats.errors import Unsupported
from ckpt_formats.files import Seal, write_all
from ckpt_formats.geometry import Box
from ckpt_formats.safetensors_file import Slot, header_bytes
from ckpt_formats.tensor import Array, Blob, Decoded, Raw, Tensor
from ckpt_formats.transfer import Transfer, as_bytes
from ckpt_formats.universal.manifest import Entry, State, hash_number, hash_text


def write_parameter(folder: Path, file: str, parameter: Parameter, transfer: Transfer) -> Entry:
    """Write all states, in slabs. The model's copy is left out if it is the master, rounded.

    Whether it is shows only at the end: so the header keeps room for it, and its
    bytes, if it needs any, come last.
    """
    states = dict(parameter.states)
    master = states.get(MASTER)
    copy = None
    if master is not None and MODEL in states and states[MODEL].shape == master.shape:
        copy = _Copy(states.pop(MODEL), master)
    metadata = {"ckpt": "universal 1", "parameter": parameter.name.encode("utf-8", "backslashreplace").decode()}
    slots = _slots([*states.items(), *([(MODEL, copy.tensor)] if copy is not None else [])])
    room = len(header_bytes(slots, metadata))
    written: dict[str, State] = {}
    with (folder / file).open("wb", buffering=0) as out:
        out.seek(room)
        for slot in slots[: len(states)]:
            beside = copy if slot.name == MASTER else None
            written[slot.name] = _write_state(out, room, slot, states[slot.name], transfer, beside)
        if copy is not None:
            written[MODEL] = copy.state() if copy.derived else _write_state(out, room, slots[-1], copy.tensor, transfer)
        head = header_bytes([slot for slot in slots if written[slot.name].offset is not None], metadata, room)
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
    for name, state in entry.states.items():
        if state.offset is not None:
            if state.codec is not None:
                raise Unsupported(f"`{entry.name}` is stored with the codec {state.codec.get('name')!r}", where=path)
            blobs[name] = Raw.packed(
                path, state.offset, state.shape, DTYPES[state.dtype], _seal(path, entry, name, state)
            )
    for name, state in entry.states.items():
        if state.offset is None and state.base is not None and state.codec is not None:
            try:
                codec = from_config(dict(state.codec))
            except CodecError as error:
                raise Unsupported(f"`{entry.name}`: {error}", where=path) from None
            blobs[name] = Decoded(codec, blobs[state.base], DTYPES[state.dtype])
    return {name: Tensor.of(blobs[name]) for name in entry.states}


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

    def compare(self, box: Box, master: Array, transfer: Transfer) -> None:
        if not self.derived:
            return
        if self._by_definition:
            self.derived = self._codec.holds(master, self.tensor.dtype)
            values = self._codec.decode(b"", master.shape, self.tensor.dtype, master)
        else:
            values = transfer.fetch(self.tensor, box, "copy")
            try:
                self._codec.encode(values, master)
            except NotApplicable:
                self.derived = False
        self._values.update(as_bytes(values).data)

    def state(self) -> State:
        digest = hash_text(self._values.intdigest())
        return State(self.tensor.dtype.name, self.tensor.shape, digest, self._codec.config(), MASTER)


def _write_state(
    out: BinaryIO | FileIO, base: int, slot: Slot, tensor: Tensor, transfer: Transfer, copy: _Copy | None = None
) -> State:
    digest = xxhash.xxh3_128()
    for box, values in transfer.slabs(tensor):
        write_all(out, as_bytes(values).data)
        digest.update(as_bytes(values).data)
        if copy is not None:
            copy.compare(box, values, transfer)
    text = hash_text(digest.intdigest())
    return State(slot.dtype.name, slot.shape, text, None, None, base + slot.offset, slot.nbytes, text)


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
