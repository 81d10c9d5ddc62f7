"""The lazy states of a parameter, as an entry of the manifest states them, and the checksums of their bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ckpt_codecs import Codec, CodecError, from_config
from ckpt_codecs.delta import DeltaCodec
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.containers.sealed_json import hash_number
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import Corrupt, Unsupported
from ckpt_formats.core.files import Seal
from ckpt_formats.core.tensor import Blob, DerivedBlob, FileBlob, Tensor
from ckpt_formats.universal.chunked import ChunkedTensor, EncodedBlob
from ckpt_formats.universal.entry import DeltaEntry, ParameterEntry, StateEntry
from ckpt_formats.universal.replay import DeltaBlob, StoredDelta

DELTA = "delta"
"""The name of the stored bytes of a delta in the header of a file."""
_Codec = TypeVar("_Codec", Codec, DeltaCodec)


def read_states(path: Path, entry: ParameterEntry, parent: Parameter | None = None) -> dict[str, Tensor]:
    """The lazy tensors of an entry; `parent` is the parameter of the same name in the parent checkpoint.

    Raises `Unsupported` for a codec that does not exist, `Corrupt` if a delta does not fit the parent.
    """
    replay = None if entry.delta is None else _replay(path, entry, entry.delta, parent)
    blobs: dict[str, Blob] = {}
    for name, state in sorted(entry.states.items(), key=lambda item: item[1].base is not None):
        if replay is not None and name in replay.form:
            blobs[name] = DeltaBlob.whole(replay, name)
        else:
            blobs[name] = _blob(path, entry, name, state, None if state.base is None else blobs[state.base])
    return {name: Tensor.of(blobs[name]) for name in entry.states}


def _blob(path: Path, entry: ParameterEntry, name: str, state: StateEntry, base: Blob | None) -> Blob:
    dtype, seal = DTYPES[state.dtype], _seal(path, entry, name, state)
    if state.codec is None and state.offset is not None:
        return FileBlob.packed(path, state.offset, state.shape, dtype, seal)
    codec = _codec(path, entry, lambda: from_config(dict(state.codec or {})))
    if state.offset is None or state.chunk is None:
        assert base is not None  # `entry_of` checks it
        return DerivedBlob(codec, base, dtype)
    label = f"{entry.name}/{name}"
    return EncodedBlob.whole(
        ChunkedTensor(path, state.offset, state.nbytes, state.shape, dtype, state.chunk, codec, label, base, seal)
    )


def _replay(path: Path, entry: ParameterEntry, delta: DeltaEntry, parent: Parameter | None) -> StoredDelta:
    codec = _codec(path, entry, lambda: delta_from_config(dict(delta.codec)))
    shape = entry.states[delta.states[0]].shape
    form = {name: DTYPES[entry.states[name].dtype] for name in delta.states}
    parent_states = {name: _parent_blob(parent, name, path, entry) for name in delta.parent_states}
    for name, blob in parent_states.items():
        if (blob.shape, blob.dtype) != (shape, form[name]):
            raise Corrupt(f"`{entry.name}`: {name!r} has another shape or type in the parent", where=path)
    replay = StoredDelta(
        path,
        delta.offset,
        delta.nbytes,
        shape,
        form,
        delta.chunk,
        codec,
        parent_states,
        f"{entry.name}/{DELTA}",
        _delta_seal(path, entry, delta),
    )
    if replay.parent is not None and replay.parent.chunk != delta.chunk:
        raise Corrupt(f"`{entry.name}`: its delta is cut into other chunks than the parent's", where=path)
    return replay


def _parent_blob(parent: Parameter | None, state: str, path: Path, entry: ParameterEntry) -> Blob:
    tensor = None if parent is None else parent.states.get(state)
    if tensor is None:
        raise Corrupt(f"`{entry.name}`: its delta is against a {state!r} that the parent does not have", where=path)
    return tensor.fragments[0].blob


def _codec(path: Path, entry: ParameterEntry, make: Callable[[], _Codec]) -> _Codec:
    try:
        return make()
    except CodecError as error:
        raise Unsupported(f"`{entry.name}`: {error}", where=path) from None


def seals(path: Path, entry: ParameterEntry) -> tuple[Seal, ...]:
    """The checksums of all bytes of the file `path`: of the header, and of everything that is stored."""
    header = Seal(path, 0, entry.header_nbytes, "xxh3-128", hash_number(entry.header), f"header of {entry.name}")
    stored = [_seal(path, entry, name, state) for name, state in entry.states.items() if state.offset is not None]
    if entry.delta is not None:
        stored.append(_delta_seal(path, entry, entry.delta))
    return (header, *(seal for seal in stored if seal is not None))


def _seal(path: Path, entry: ParameterEntry, name: str, state: StateEntry) -> Seal | None:
    if state.offset is None or state.stored is None:
        return None
    return Seal(path, state.offset, state.nbytes, "xxh3-128", hash_number(state.stored), f"{entry.name}/{name}")


def _delta_seal(path: Path, entry: ParameterEntry, delta: DeltaEntry) -> Seal:
    return Seal(path, delta.offset, delta.nbytes, "xxh3-128", hash_number(delta.stored), f"{entry.name}/{DELTA}")
