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
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from ckpt_codecs import CodecError
from ckpt_codecs.delta import DeltaCodec
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.files import Reader, Seal
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, Blob, DerivedBlob, FileBlob, FlatRangeBlob
from ckpt_formats.universal.chunked import OVERHEAD, ChunkDirectory, chunk_count, chunk_form, read_chunks

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

    @property
    def count(self) -> int:
        return chunk_count(self.shape, self.chunk)

    def flat_range(self, index: int) -> tuple[int, int]:
        """The elements that a chunk holds, counted in C order."""
        each = prod(self.chunk)
        return index * each, min((index + 1) * each, prod(self.shape))

    def lineage(self) -> list["StoredDelta"]:
        """All deltas on the way to this one, the first of them first."""
        found, at = [self], self.parent
        while at is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    def values(self, index: int, reader: Reader) -> StateArrays:
        """A chunk of all states, decoded and checked. Raises `Corrupt`."""
        held = reader.keep((self.path, self.offset, index), lambda: _packed(self._replayed(index, reader)))
        start, stop = self.flat_range(index)
        joint, at = {}, 0
        for state, dtype in self.form.items():
            nbytes = (stop - start) * dtype.itemsize
            joint[state] = held[at : at + nbytes].view(dtype)
            at += nbytes
        return joint

    def sources(self, box: Box) -> Iterator[FileBlob]:
        """The deltas, and what the first of them stands on."""
        for replay in self.lineage():
            yield FileBlob.packed(replay.path, replay.offset, (replay.nbytes,), np.dtype(np.uint8), replay.seal)
            for blob in replay.before.values():
                if _replay_of(blob) is None:
                    yield from blob.crop(box).sources()

    def _replayed(self, index: int, reader: Reader) -> StateArrays:
        joint: StateArrays = {}
        for replay in self.lineage():
            joint = replay._decoded(index, joint, reader)
        return joint

    def _decoded(self, index: int, earlier: StateArrays, reader: Reader) -> StateArrays:
        """The chunk, from that of the parent."""
        start, stop = self.flat_range(index)
        form = chunk_form(self.chunk, stop - start)
        before = {
            state: _chunk_of(blob, start, stop, earlier, reader).reshape(form) for state, blob in self.before.items()
        }
        most = prod(self.chunk) * sum(dtype.itemsize for dtype in self.form.values()) + OVERHEAD
        listed = ChunkDirectory(self.path, self.offset, self.nbytes, self.count, most, self.label, self.seal)
        chunk, digest = listed.chunk(index, reader)
        data = bytes(chunk)
        try:
            made = self.codec.decode(data, before, form, self.form)
        except CodecError as error:
            raise listed.corrupt(index, self.codec.name, str(error)) from None
        joint = {}
        for state, dtype in self.form.items():
            values = made.get(state)
            if values is None or values.shape != form or values.dtype != dtype:
                raise listed.corrupt(index, self.codec.name, f"`{state}` did not come out in its shape and type")
            joint[state] = np.ascontiguousarray(values).reshape(-1)
        if states_digest(joint) != digest:
            raise listed.corrupt(index, self.codec.name, "its values do not fit their checksum")
        return joint


class StatesReplay(Protocol):
    """What gives all states of one parameter at once, chunk by chunk: deltas, or steps of its optimizer."""

    @property
    def shape(self) -> Shape: ...
    @property
    def form(self) -> Mapping[str, DType]:
        """The states and their types."""

    @property
    def chunk(self) -> Shape: ...
    @property
    def count(self) -> int:
        """Of chunks."""

    def flat_range(self, index: int) -> tuple[int, int]:
        """The elements that a chunk holds, counted in C order."""

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
        read_chunks(out, self.box, replay.shape, replay.chunk, lambda index: replay.values(index, reader)[self.state])

    def sources(self) -> Iterator[FileBlob]:
        return self.replay.sources(self.box)


def states_digest(joint: Mapping[str, Array]) -> int:
    """The XXH3-64 of a chunk of several states, one after another."""
    hashed = xxhash.xxh3_64()
    for values in joint.values():
        hashed.update(values.reshape(-1).view(np.uint8).data)
    return int(hashed.intdigest())


def _packed(joint: StateArrays) -> Array:
    return np.concatenate([values.view(np.uint8) for values in joint.values()])


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
