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
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ckpt_codecs.errors import CodecError
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, flat_boxes
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, FileBlob, FlatRangeBlob, Fragment, Tensor
from ckpt_formats.universal.chunked import ChunkStore, is_digest, read_chunks

if TYPE_CHECKING:
    from ckpt_codecs.delta import DeltaCodec

StateArrays = dict[str, Array]
"""A chunk of every state, each as a vector."""
Place = tuple[str, int, int]
"""Where something that is computed at once comes in the order of reading."""


@dataclass(frozen=True, eq=False)
class StoredDelta:
    """Some states of one parameter at one step, coded together against those of the step before.

    States have their stored names here, which codecs know.
    """

    stored: ChunkStore
    shape: Shape
    form: Mapping[str, DType]
    """The states and their types."""
    digests: Mapping[str, bytes]
    """Of each state, the XXH3-128 of the values of each chunk, one after another."""
    codec: "DeltaCodec"
    before: Mapping[str, Blob]
    """The parent's states that the codec was given, whole."""

    @cached_property
    def parent(self) -> "StoredDelta | None":
        """The delta that the states before this one are in, if any of them is in one."""
        replays = (replay_of(blob) for blob in self.before.values())
        return next((replay for replay in replays if replay is not None), None)

    @cached_property
    def chunking(self) -> Chunking:
        return Chunking.default(self.shape)

    def lineage(self) -> list["StoredDelta"]:
        """All deltas on the way to this one, the first of them first."""
        deltas, at = [self], self.parent
        while at is not None:
            deltas.append(at)
            at = at.parent
        return deltas[::-1]

    def values(self, index: int, reader: Reader) -> StateArrays:
        """A chunk of all states, decoded and checked. Raises `CorruptError`."""
        packed = reader.cached_or((self, index), lambda: _packed(self._replayed(index, reader)))
        start, stop = self.chunking.range(index)
        states, at = {}, 0
        for state, dtype in self.form.items():
            nbytes = (stop - start) * dtype.itemsize
            states[state] = packed[at : at + nbytes].view(dtype)
            at += nbytes
        return states

    def pieces(self, box: Box) -> Iterator[tuple[Place, Box]]:
        """See `StatesReplay.pieces`."""
        for index in self.chunking.touched(box):
            for run in flat_boxes(self.shape, *self.chunking.range(index)):
                common = run & box
                if common is not None:
                    yield (str(self.stored.path), self.stored.offset, index), common

    def read_into(self, state: str, box: Box, out: Array, reader: Reader) -> None:
        """See `StatesReplay.read_into`. Any shape and dtype."""
        read_chunks(out, box, self.chunking, lambda index: self.values(index, reader)[state])

    def sources(self, box: Box) -> Iterator[FileBlob]:
        """The deltas, and what the first of them stands on."""
        for replay in self.lineage():
            yield replay.stored.source(replay.chunking.touched(box))
            for blob in replay.before.values():
                if replay_of(blob) is None:
                    yield from blob.crop(box).sources()

    def _replayed(self, index: int, reader: Reader) -> StateArrays:
        states: StateArrays = {}
        for replay in self.lineage():
            states = replay.decoded(index, states, reader)
        return states

    def decoded(self, index: int, earlier: StateArrays, reader: Reader) -> StateArrays:
        """A chunk of all states, checked: each (size) of its dtype. `earlier`: that of the parent.

        Raises `CorruptError`.
        """
        start, stop = self.chunking.range(index)
        form = self.chunking.chunk_shape(stop - start)
        before = {
            state: chunk_of(blob, start, stop, earlier, reader).reshape(form) for state, blob in self.before.items()
        }
        data = bytes(self.stored.chunk(index, reader))
        try:
            decoded = self.codec.decode(data, before, form, self.form)
        except CodecError as error:
            raise self.stored.corrupt(index, self.codec.name, str(error)) from None
        states = {}
        for state, dtype in self.form.items():
            values = decoded.get(state)
            if values is None or values.shape != form or values.dtype != dtype:
                raise self.stored.corrupt(
                    index, self.codec.name, f"`{from_stored(state)}` did not come out in its shape and type"
                )
            states[state] = np.ascontiguousarray(values).reshape(-1)
            if not is_digest(states[state], self.digests[state], index):
                raise self.stored.corrupt(
                    index, self.codec.name, f"the values of `{from_stored(state)}` do not fit their checksum"
                )
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
        """A chunk of all states: each (size) of its dtype in `form`. Raises `CorruptError`."""

    def pieces(self, box: Box) -> Iterator[tuple[Place, Box]]:
        """The parts of a block of the states, each with the place of what it is computed from, in the order of places.

        What has one place, of whichever tensor, is computed at once. In the order of places, nothing is computed twice.
        """

    def read_into(self, state: str, box: Box, out: Array, reader: Reader) -> None:
        """Fill `out` with a block of a state: (shape) of the block, of the state's dtype. Raises `CorruptError`."""

    def sources(self, box: Box) -> Iterator[FileBlob]:
        """The file ranges that a block of the states comes from."""


@dataclass(frozen=True)
class DeltaBlob(BlockBlob):
    """A block of one state of a replay."""

    replay: StatesReplay
    state: str
    box: Box

    @classmethod
    def whole(cls, replay: StatesReplay, state: str) -> "DeltaBlob":
        return cls(replay, state, Box.whole(replay.shape))

    @property
    def dtype(self) -> DType:
        return self.replay.form[self.state]

    @property
    def reads_in_place(self) -> bool:
        return True

    def read_into(self, out: Array, reader: Reader) -> None:
        self.replay.read_into(self.state, self.box, out, reader)

    def sources(self) -> Iterator[FileBlob]:
        return self.replay.sources(self.box)


def _packed(states: StateArrays) -> Array:
    return np.concatenate([values.view(np.uint8) for values in states.values()])


def stored_delta(blob: Blob) -> StoredDelta | None:
    """The delta that a blob's values are stored in, if they are."""
    return blob.replay if isinstance(blob, DeltaBlob) and isinstance(blob.replay, StoredDelta) else None


def replay_of(blob: Blob) -> StoredDelta | None:
    """The replay that a blob's values come from, or are derived from."""
    if isinstance(blob, DerivedBlob):
        return replay_of(blob.base)
    return stored_delta(blob)


def values_of(blob: Blob) -> Tensor:
    """The values of a blob, whether they are replayed or not: no replay of another delta goes on from them."""
    return Tensor(blob.shape, blob.dtype, (Fragment(Box.whole(blob.shape), blob),))


def chunk_of(blob: Blob, start: int, stop: int, earlier: StateArrays, reader: Reader) -> Array:
    """Elements `start` to `stop` of a state at one step, of which `earlier` is what was replayed.

    earlier: arrays of any dtype, by state, in the shape of their chunk. The result is one of them, or (elements,)
    of the blob's dtype.
    """
    if isinstance(blob, DeltaBlob) and stored_delta(blob) is not None:
        return earlier[blob.state]
    if isinstance(blob, DerivedBlob) and replay_of(blob) is not None:
        base = chunk_of(blob.base, start, stop, earlier, reader)
        return blob.codec.decode(b"", base.shape, blob.dtype, base)
    values = np.empty(stop - start, blob.dtype)
    FlatRangeBlob(blob, start, stop).read_into(values, reader)
    return values
