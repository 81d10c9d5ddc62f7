"""Write states that come from one replay, chunk by chunk and all at once, so that no stored byte is read twice."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_formats.core.checkpoint import MASTER, Parameter
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.files import write_at
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.own_folder import create_own
from ckpt_formats.core.tensor import Blob, FileBlob, Fragment, Tensor
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.core.views import ReshapedBlob
from ckpt_formats.universal.chunked import ChunkDigests
from ckpt_formats.universal.encode_state import flat
from ckpt_formats.universal.entry import ALIGNMENT, StateEntry
from ckpt_formats.universal.model_copy import ModelCopy
from ckpt_formats.universal.pack_file import PackFile
from ckpt_formats.universal.replay import DeltaBlob, StatesReplay


def is_aligned(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor end at a multiple of 8, so that what follows them in a pack is aligned."""
    return tensor.nbytes % ALIGNMENT == 0


def stored_delta_of(parameter: Parameter) -> StatesReplay | None:
    """The replay from which full states of a parameter come; None if none do."""
    return next((blob.replay for blob in _blobs(parameter).values() if isinstance(blob, DeltaBlob)), None)


def replays_of_boxes(parameter: Parameter) -> list[StatesReplay]:
    """The replays from which boxes of a parameter's states come, each once."""
    blobs = (f.blob for tensor in parameter.states.values() for f in tensor.fragments if len(tensor.fragments) > 1)
    replays = (delta.replay for blob in blobs if (delta := _delta_blob(blob)) is not None)
    return list({id(replay): replay for replay in replays}.values())


def spill_boxes(path: Path, parameter: Parameter, replays: Sequence[StatesReplay], transfer: Transfer) -> Parameter:
    """Write all states of several replays, not encoded, to a file at `path`, and return the parameter with these."""
    plain, at = dict[tuple[int, str], FileBlob](), 0
    with os.fdopen(create_own(path), "wb", buffering=0) as out:
        for replay in replays:
            vectors = {state: flat(Tensor.of(DeltaBlob.whole(replay, state))) for state in replay.form}
            for state, dtype in replay.form.items():
                plain[id(replay), state] = FileBlob.packed(path, at, replay.shape, dtype)
                at += plain[id(replay), state].span
            for index in range(replay.chunking.count):
                box = replay.chunking.box(index)
                for state, vector in vectors.items():
                    raw, values = plain[id(replay), state], transfer.fetch(vector, box, counted=False)
                    write_at(out.fileno(), as_bytes(values).data, raw.offset + box.start[0] * raw.dtype.itemsize)
    states = {
        state: replace(tensor, fragments=tuple(Fragment(f.box, _from_file(f.blob, plain)) for f in tensor.fragments))
        for state, tensor in parameter.states.items()
    }
    return replace(parameter, states=states)


def _delta_blob(blob: Blob) -> DeltaBlob | None:
    """The block of a replay that a blob's values come from."""
    if isinstance(blob, (DerivedBlob, ReshapedBlob)):
        return _delta_blob(blob.base)
    return blob if isinstance(blob, DeltaBlob) else None


def _from_file(blob: Blob, plain: Mapping[tuple[int, str], FileBlob]) -> Blob:
    """The same values from the file of a replay, if they come from one."""
    if isinstance(blob, (DerivedBlob, ReshapedBlob)):
        return replace(blob, base=_from_file(blob.base, plain))
    if not isinstance(blob, DeltaBlob):
        return blob
    raw = plain.get((id(blob.replay), blob.state))
    return blob if raw is None else raw.crop(blob.box)


def are_written_together(parameter: Parameter, replay: StatesReplay) -> bool:
    """Whether `write_together` writes all states of the replay; others must be read one by one."""
    return all(is_aligned(parameter.states[name]) for name in _names(parameter, replay))


def spill_states(path: Path, parameter: Parameter, replay: StatesReplay, transfer: Transfer) -> Parameter:
    """Write all states of a replay, not encoded, to a file at `path`. Returns the parameter with these states."""
    blobs, plain, at = _blobs(parameter), dict[int, FileBlob](), 0
    for blob in blobs.values():
        if isinstance(blob, DeltaBlob) and blob.replay is replay:
            plain[id(blob)] = FileBlob.packed(path, at, blob.shape, blob.dtype)
            at += plain[id(blob)].span
    with os.fdopen(create_own(path), "wb", buffering=0) as out:
        copies = [(flat(Tensor.of(blob)), plain[id(blob)]) for blob in blobs.values() if id(blob) in plain]
        for index in range(replay.chunking.count):
            start, stop = replay.chunking.range(index)
            for tensor, raw in copies:
                values = transfer.fetch(tensor, Box((start,), (stop,)), counted=False)
                write_at(out.fileno(), as_bytes(values).data, raw.offset + start * raw.dtype.itemsize)
    return with_plain(parameter, plain)


def with_plain(parameter: Parameter, plain: Mapping[int, FileBlob]) -> Parameter:
    """The parameter with some blobs replaced, by their `id`, also where a state is derived from one of them."""
    blobs = _blobs(parameter)
    states = {state: _plain(tensor, blobs.get(state), plain) for state, tensor in parameter.states.items()}
    return replace(parameter, states=states)


def write_together(
    out: PackFile, parameter: Parameter, replay: StatesReplay, copy: ModelCopy | None, transfer: Transfer
) -> dict[str, StateEntry]:
    """Write the states of a replay, not encoded, each into a range of its own, and return their entries."""
    names = [name for name in _names(parameter, replay) if is_aligned(parameter.states[name])]
    tensors = {name: flat(parameter.states[name]) for name in names}
    in_order = replay.chunking.count == 1  # then each state is written whole, and needs no call of its own
    extents = {} if in_order else {name: out.reserve(tensor.nbytes) for name, tensor in tensors.items()}
    digests = {name: ChunkDigests(parameter.states[name]) for name in names}
    copied = None if copy is None else flat(copy.tensor)
    for index in range(replay.chunking.count):
        box = replay.chunking.box(index)
        for name, tensor in tensors.items():
            values = transfer.fetch(tensor, box)
            data, start = as_bytes(values).data, out.position
            if in_order:
                out.write(data)
                extents[name] = out.since(start)
            else:
                out.write_at(data, extents[name].offset + box.start[0] * tensor.dtype.itemsize)
            digests[name].add(values)
            if name == MASTER and copy is not None and copied is not None:
                copy.compare(box, values, transfer, copied)
    return {
        name: StateEntry(tensor.dtype.name, parameter.states[name].shape, digests[name].digests(), extents[name])
        for name, tensor in tensors.items()
    }


def _blobs(parameter: Parameter) -> Mapping[str, Blob]:
    """The states that are one blob each."""
    return {
        state: tensor.fragments[0].blob
        for state, tensor in parameter.states.items()
        if len(tensor.fragments) == 1 and not tensor.replicas and tensor.fragments[0].box.shape == tensor.shape
    }


def _names(parameter: Parameter, replay: StatesReplay) -> list[str]:
    """The states of a parameter that come from a replay."""
    blobs = _blobs(parameter).items()
    return [name for name, blob in blobs if isinstance(blob, DeltaBlob) and blob.replay is replay]


def _plain(tensor: Tensor, blob: Blob | None, plain: Mapping[int, FileBlob]) -> Tensor:
    if id(blob) in plain:
        return Tensor.of(plain[id(blob)])
    if isinstance(blob, DerivedBlob) and id(blob.base) in plain:
        return Tensor.of(replace(blob, base=plain[id(blob.base)]))
    return tensor
