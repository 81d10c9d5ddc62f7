"""Write states that come from one replay, chunk by chunk and all at once, so that no stored byte is read twice."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path

import xxhash

from ckpt_formats.containers.safetensors import TensorSlot
from ckpt_formats.containers.sealed_json import hash_text
from ckpt_formats.core.checkpoint import MASTER, Parameter
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Blob, DerivedBlob, FileBlob, Tensor
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.universal.encode_state import flat
from ckpt_formats.universal.entry import StateEntry
from ckpt_formats.universal.model_copy import ModelCopy
from ckpt_formats.universal.replay import DeltaBlob, StatesReplay


def stored_delta_of(parameter: Parameter) -> StatesReplay | None:
    """The replay from which full states of a parameter come; None if none do."""
    return next((blob.replay for blob in _blobs(parameter).values() if isinstance(blob, DeltaBlob)), None)


def spill_states(path: Path, parameter: Parameter, replay: StatesReplay, transfer: Transfer) -> Parameter:
    """Write all states of a replay, not encoded, to a file at `path`. Returns the parameter with these states."""
    blobs, plain, at = _blobs(parameter), dict[int, FileBlob](), 0
    for blob in blobs.values():
        if isinstance(blob, DeltaBlob) and blob.replay is replay:
            plain[id(blob)] = FileBlob.packed(path, at, blob.shape, blob.dtype)
            at += plain[id(blob)].span
    with path.open("wb", buffering=0) as out:
        copies = [(flat(Tensor.of(blob)), plain[id(blob)]) for blob in blobs.values() if id(blob) in plain]
        for index in range(replay.chunking.count):
            start, stop = replay.chunking.range(index)
            for tensor, raw in copies:
                values = transfer.fetch(tensor, Box((start,), (stop,)), counted=False)
                _write_at(out.fileno(), as_bytes(values).data, raw.offset + start * raw.dtype.itemsize)
    states = {state: _plain(tensor, blobs.get(state), plain) for state, tensor in parameter.states.items()}
    return replace(parameter, states=states)


def write_together(
    out: FileIO,
    begin: int,
    slots: Iterable[TensorSlot],
    parameter: Parameter,
    replay: StatesReplay,
    copy: ModelCopy | None,
    transfer: Transfer,
) -> dict[str, StateEntry]:
    """Write the states of a replay, not encoded, each to its slot, and return their entries.

    The offsets of slots count from byte `begin` of the file.
    """
    blobs = _blobs(parameter)
    replayed_slots = [
        slot for slot in slots if isinstance(blob := blobs.get(slot.name), DeltaBlob) and blob.replay is replay
    ]
    tensors = {slot.name: flat(parameter.states[slot.name]) for slot in replayed_slots}
    digests = {slot.name: xxhash.xxh3_128() for slot in replayed_slots}
    copied = None if copy is None else flat(copy.tensor)
    for index in range(replay.chunking.count):
        start, stop = replay.chunking.range(index)
        box = Box((start,), (stop,))
        for slot in replayed_slots:
            values = transfer.fetch(tensors[slot.name], box)
            _write_at(out.fileno(), as_bytes(values).data, begin + slot.offset + start * slot.dtype.itemsize)
            digests[slot.name].update(as_bytes(values).data)
            if slot.name == MASTER and copy is not None and copied is not None:
                copy.compare(box, values, transfer, copied)
    states = {}
    for slot in replayed_slots:
        text = hash_text(digests[slot.name].intdigest())
        states[slot.name] = StateEntry(
            slot.dtype.name, slot.shape, text, offset=begin + slot.offset, nbytes=slot.nbytes, stored=text
        )
    return states


def _blobs(parameter: Parameter) -> Mapping[str, Blob]:
    """The states that are one blob each."""
    return {
        state: tensor.fragments[0].blob
        for state, tensor in parameter.states.items()
        if len(tensor.fragments) == 1 and not tensor.replicas and tensor.fragments[0].box.shape == tensor.shape
    }


def _plain(tensor: Tensor, blob: Blob | None, plain: Mapping[int, FileBlob]) -> Tensor:
    if id(blob) in plain:
        return Tensor.of(plain[id(blob)])
    if isinstance(blob, DerivedBlob) and id(blob.base) in plain:
        return Tensor.of(DerivedBlob(blob.codec, plain[id(blob.base)], blob.dtype))
    return tensor


def _write_at(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done
