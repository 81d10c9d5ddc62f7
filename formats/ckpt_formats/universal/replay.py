"""States that are stored as a delta: replayed from the base on, chunk by chunk and all states of a parameter at once.

    base      fp32 exp_avg exp_avg_sq      blobs of any kind
      delta   one blob with all of them    Replay, whose parent is None
        delta                              Replay, whose parent is the one above

A chunk is decoded once for each delta on the way, and never more than two of
them are held, however long the chain is. See docs/format.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from ckpt_codecs import CodecError
from ckpt_codecs.delta import DeltaCodec
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.files import Reader, Seal
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, Blob, DerivedBlob, FileBlob, FlatRangeBlob
from ckpt_formats.universal.chunked import OVERHEAD, ChunkDirectory, read_chunks

StateArrays = dict[str, Array]
"""A chunk of every state, each as a vector."""


@dataclass(frozen=True, eq=False)
class StoredDelta:
    """Some states of one parameter at one step, coded together against those of the step before."""

    path: Path
    offset: int
    nbytes: int
    shape: Shape
    form: Mapping[str, DType]
    """The states and their types, in the order in which they are hashed."""
    chunk: Shape
    codec: DeltaCodec
    before: Mapping[str, Blob]
    """The parent's states that the codec was given, whole."""
    label: str
    seal: Seal

    @cached_property
    def parent(self) -> "StoredDelta | None":
        """The delta that the states before this one are in, if any of them is in one."""
        replays = (_replay_of(blob) for blob in self.before.values())
        return next((replay for replay in replays if replay is not None), None)

    @cached_property
    def chunking(self) -> Chunking:
        return Chunking(self.shape, self.chunk)

    def lineage(self) -> list["StoredDelta"]:
        """All deltas on the way to this one, the first of them first."""
        deltas, at = [self], self.parent
        while at is not None:
            deltas.append(at)
            at = at.parent
        return deltas[::-1]

    def values(self, index: int, reader: Reader) -> StateArrays:
        """A chunk of all states, decoded and checked. Raises `Corrupt`."""
        packed = reader.cached_or((self.path, self.offset, index), lambda: _packed(self._replayed(index, reader)))
        start, stop = self.chunking.range(index)
        states, at = {}, 0
        for state, dtype in self.form.items():
            nbytes = (stop - start) * dtype.itemsize
            states[state] = packed[at : at + nbytes].view(dtype)
            at += nbytes
        return states

    def sources(self, box: Box) -> Iterator[FileBlob]:
        """The deltas, and what the first of them stands on."""
        for replay in self.lineage():
            yield FileBlob.packed(replay.path, replay.offset, (replay.nbytes,), np.dtype(np.uint8), replay.seal)
            for blob in replay.before.values():
                if _replay_of(blob) is None:
                    yield from blob.crop(box).sources()

    def _replayed(self, index: int, reader: Reader) -> StateArrays:
        states: StateArrays = {}
        for replay in self.lineage():
            states = replay._decoded(index, states, reader)
        return states

    def _decoded(self, index: int, earlier: StateArrays, reader: Reader) -> StateArrays:
        """The chunk, from that of the parent."""
        start, stop = self.chunking.range(index)
        form = self.chunking.chunk_shape(stop - start)
        before = {
            state: _chunk_of(blob, start, stop, earlier, reader).reshape(form) for state, blob in self.before.items()
        }
        limit = self.chunking.chunk_size * sum(dtype.itemsize for dtype in self.form.values()) + OVERHEAD
        directory = ChunkDirectory(
            self.path, self.offset, self.nbytes, self.chunking.count, limit, self.label, self.seal
        )
        chunk, digest = directory.chunk(index, reader)
        data = bytes(chunk)
        try:
            decoded = self.codec.decode(data, before, form, self.form)
        except CodecError as error:
            raise directory.corrupt(index, self.codec.name, str(error)) from None
        states = {}
        for state, dtype in self.form.items():
            values = decoded.get(state)
            if values is None or values.shape != form or values.dtype != dtype:
                raise directory.corrupt(index, self.codec.name, f"`{state}` did not come out in its shape and type")
            states[state] = np.ascontiguousarray(values).reshape(-1)
        if states_digest(states) != digest:
            raise directory.corrupt(index, self.codec.name, "its values do not fit their checksum")
        return states


class StatesReplay(Protocol):
    """What gives all states of one parameter at once, chunk by chunk: deltas, or steps of its optimizer."""

    @property
    def shape(self) -> Shape: ...
    @property
    def form(self) -> Mapping[str, DType]:
        """The states and their types."""

    @property
    def chunking(self) -> Chunking: ...

    def values(self, index: int, reader: Reader) -> Mapping[str, Array]:
        """A chunk of all states, each as a vector. Raises `Corrupt`."""

    def sources(self, box: Box) -> Iterator[FileBlob]:
        """The file ranges that a block of the states comes from."""


@dataclass(frozen=True)
class DeltaBlob(Blob):
    """A block of one state of a replay."""

    replay: StatesReplay
    state: str
    box: Box

    @classmethod
    def whole(cls, replay: StatesReplay, state: str) -> "DeltaBlob":
        return cls(replay, state, Box.whole(replay.shape))

    @property
    def shape(self) -> Shape:
        return self.box.shape

    @property
    def dtype(self) -> DType:
        return self.replay.form[self.state]

    def crop(self, box: Box) -> "DeltaBlob":
        return DeltaBlob(self.replay, self.state, box.shift(self.box.start))

    def read_into(self, out: Array, reader: Reader) -> None:
        replay = self.replay
        read_chunks(out, self.box, replay.chunking, lambda index: replay.values(index, reader)[self.state])

    def sources(self) -> Iterator[FileBlob]:
        return self.replay.sources(self.box)


def states_digest(states: Mapping[str, Array]) -> int:
    """The XXH3-64 of a chunk of several states, one after another."""
    hashed = xxhash.xxh3_64()
    for values in states.values():
        hashed.update(values.reshape(-1).view(np.uint8).data)
    return int(hashed.intdigest())


def _packed(states: StateArrays) -> Array:
    return np.concatenate([values.view(np.uint8) for values in states.values()])


def stored_delta(blob: Blob) -> StoredDelta | None:
    """The delta that a blob's values are stored in, if they are."""
    return blob.replay if isinstance(blob, DeltaBlob) and isinstance(blob.replay, StoredDelta) else None


def _replay_of(blob: Blob) -> StoredDelta | None:
    """The replay that a blob's values come from, or are derived from."""
    if isinstance(blob, DerivedBlob):
        return _replay_of(blob.base)
    return stored_delta(blob)


def _chunk_of(blob: Blob, start: int, stop: int, earlier: StateArrays, reader: Reader) -> Array:
    """Elements `start` to `stop` of a state of the parent, of which `earlier` is what was replayed."""
    if isinstance(blob, DeltaBlob) and stored_delta(blob) is not None:
        return earlier[blob.state]
    if isinstance(blob, DerivedBlob) and _replay_of(blob) is not None:
        base = _chunk_of(blob.base, start, stop, earlier, reader)
        return blob.codec.decode(b"", base.shape, blob.dtype, base)
    values = np.empty(stop - start, blob.dtype)
    FlatRangeBlob(blob, start, stop).read_into(values, reader)
    return values
