"""The lazy states of a parameter, as the index states them, and the checksums of their bytes."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ckpt_codecs.base import Codec
from ckpt_codecs.errors import CodecError
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.seals import Leaves, Seal
from ckpt_formats.core.state_names import from_stored, to_stored
from ckpt_formats.core.tensor import Array, Blob, FileBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.universal.chunked import ChunkedTensor, ChunkStore, EncodedBlob
from ckpt_formats.universal.entry import DELTA, DeltaEntry, ParameterEntry, StateEntry
from ckpt_formats.universal.manifest import PackFiles
from ckpt_formats.universal.replay import DeltaBlob, StoredDelta, replay_of, values_of

if TYPE_CHECKING:
    from ckpt_codecs.delta import DeltaCodec

_ROUNDED = "rounded"
"""The codec of copies that are derived from their masters."""
_SCALES = DTYPES["float8_e8m0fnu"]
_Codec = TypeVar("_Codec", Codec, "DeltaCodec")


def read_parameter(files: PackFiles, entry: ParameterEntry, parent: Parameter | None = None) -> Parameter:
    """The parameter of an entry, with lazy tensors; `parent` is that of the same name in the parent checkpoint.

    Raises `UnsupportedError` for a codec that does not exist, `CorruptError` if a delta does not fit the parent.
    """
    replay = None if entry.delta is None else _replay(files, entry, entry.delta, parent)
    blobs: dict[str, Blob] = {}
    for name, state in sorted(entry.states.items(), key=lambda item: item[1].base is not None):
        if replay is not None and to_stored(name) in replay.form:
            blobs[name] = DeltaBlob.whole(replay, to_stored(name))
        else:
            blobs[name] = _blob(files, entry, name, state, None if state.base is None else blobs[state.base])
    states = {name: Tensor.of(blobs[name]) for name in entry.states}
    return Parameter(entry.name, entry.role, states, entry.values)


def seals(files: PackFiles, entry: ParameterEntry) -> Iterator[Seal]:
    """The checksums of all bytes that are stored for a parameter."""
    for name, state in entry.states.items():
        if state.chunks is not None:
            yield _store(files, entry, name, state).seal()
        elif state.extent is not None:
            yield _plain_seal(files, entry, name, state)
    if entry.delta is not None:
        yield _delta_store(files, entry, entry.delta).seal()


def can_derive(master: DType, copy: DType) -> bool:
    """Whether a copy of one dtype may be stored as its master of another, rounded.

    Rounding to scales (float8_e8m0fnu) has ties that are not to even, and no zero, so those are stored.
    """
    from ckpt_codecs.lossless.rounded import Rounded

    same_kind = (master.kind == "c") == (copy.kind == "c")
    return master == copy or (same_kind and copy != _SCALES and Rounded.can_round(master, copy))


def _blob(files: PackFiles, entry: ParameterEntry, name: str, state: StateEntry, base: Blob | None) -> Blob:
    dtype = DTYPES[state.dtype]
    if state.codec is None:
        seal = _plain_seal(files, entry, name, state)
        return FileBlob.packed(seal.path, seal.offset, state.shape, dtype, seal)
    from ckpt_codecs.registry import from_config  # most states have no codec

    codec = _codec(files, entry, lambda: from_config(dict(state.codec or {})))
    if state.extent is None:
        assert base is not None  # `check_index` checks it
        if codec.name != _ROUNDED or not can_derive(base.dtype, dtype):
            raise CorruptError(
                f"`{printable(entry.name)}`: {name!r} is not stored, and cannot be derived", where=files.checkpoint
            )
        return DerivedBlob(codec, base, dtype)
    if codec.name == _ROUNDED:
        raise CorruptError(
            f"`{printable(entry.name)}`: {name!r} is stored, but a rounded copy has no bytes", where=files.checkpoint
        )
    store = _store(files, entry, name, state)
    return EncodedBlob.whole(ChunkedTensor(store, state.shape, dtype, codec, state.digests, base))


def _store(files: PackFiles, entry: ParameterEntry, name: str, state: StateEntry) -> ChunkStore:
    assert state.extent is not None
    assert state.chunks is not None
    return ChunkStore(files.path(state.extent.pack), state.extent.offset, state.chunks, f"{entry.name}/{name}")


def _delta_store(files: PackFiles, entry: ParameterEntry, delta: DeltaEntry) -> ChunkStore:
    return ChunkStore(files.path(delta.extent.pack), delta.extent.offset, delta.chunks, f"{entry.name}/{DELTA}")


def _plain_seal(files: PackFiles, entry: ParameterEntry, name: str, state: StateEntry) -> Seal:
    assert state.extent is not None
    extent = state.extent
    chunk_nbytes, lengths = _chunk_lengths(state.shape, DTYPES[state.dtype].itemsize, extent.nbytes)
    return Seal(
        files.path(extent.pack),
        extent.offset,
        extent.nbytes,
        "xxh3-128",
        state.digest,
        f"{entry.name}/{name}",
        chunk_nbytes,
        Leaves(lengths, state.digests),
    )


@lru_cache(1 << 8)  # a checkpoint has many states of few shapes
def _chunk_lengths(shape: Shape, itemsize: int, nbytes: int) -> tuple[int, Array]:
    """The bytes of every chunk but the last, and the length of each: (chunks,) int64."""
    chunking = Chunking.default(shape)
    chunk_nbytes = chunking.chunk_size * itemsize
    lengths = np.full(chunking.count, chunk_nbytes, np.int64)
    if chunking.count:
        lengths[-1] = nbytes - chunk_nbytes * (chunking.count - 1)
    lengths.flags.writeable = False
    return chunk_nbytes, lengths


def _replay(files: PackFiles, entry: ParameterEntry, delta: DeltaEntry, parent: Parameter | None) -> StoredDelta:
    from ckpt_codecs.registry import delta_from_config

    codec = _codec(files, entry, lambda: delta_from_config(dict(delta.codec)))
    shape = entry.states[delta.states[0]].shape
    form = {to_stored(name): DTYPES[entry.states[name].dtype] for name in delta.states}
    store = _delta_store(files, entry, delta)
    parent_states = {to_stored(name): _parent_blob(parent, name, store.path, entry) for name in delta.parent_states}
    if len({id(one) for blob in parent_states.values() if (one := replay_of(blob)) is not None}) > 1:
        # Only the states of one replay are replayed together. Others are read as values.
        parent_states = {name: values_of(blob) for name, blob in parent_states.items()}
    for name, blob in parent_states.items():
        if (blob.shape, blob.dtype) != (shape, form[name]):
            raise CorruptError(
                f"`{entry.name}`: {from_stored(name)!r} has another shape or type in the parent", where=store.path
            )
    digests = {to_stored(name): entry.states[name].digests for name in delta.states}
    return StoredDelta(store, shape, form, digests, codec, parent_states)


def _parent_blob(parent: Parameter | None, state: str, path: Path, entry: ParameterEntry) -> Blob:
    tensor = None if parent is None else parent.states.get(state)
    if tensor is None:
        raise CorruptError(
            f"`{entry.name}`: its delta is against a {state!r} that the parent does not have", where=path
        )
    is_one = len(tensor.fragments) == 1 and not tensor.replicas
    return tensor.fragments[0].blob if is_one and tensor.fragments[0].box.shape == tensor.shape else tensor


def _codec(files: PackFiles, entry: ParameterEntry, make: Callable[[], _Codec]) -> _Codec:
    try:
        return make()
    except CodecError as error:
        raise UnsupportedError(f"`{entry.name}`: {error}", where=files.checkpoint) from None
