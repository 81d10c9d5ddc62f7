"""A state in memory: each tensor whole, in C order, and where the chunks of the published pieces lie in it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box, flat_boxes, flat_ends
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import printable
from ckpt_formats.universal.published.model import PublishedModel, PublishedTensor, TensorPiece
from ckpt_formats.universal.published.share import batches_of

State = Sequence[Array] | Mapping[int, Array]
"""The values of each tensor of a model by its number, or of each chunk: (elements,) in its dtype, contiguous."""


@dataclass(frozen=True)
class StateChunk:
    """A chunk of a rank's state: a range of the elements of a piece, in C order."""

    number: int
    """Within the rank's object."""
    piece: TensorPiece
    start: int
    stop: int
    slot: int | None = None
    """The number of the array of the state that has just this chunk; None: the array is that of the tensor."""

    @property
    def tensor(self) -> int:
        """The number of its tensor in the model."""
        return self.piece.tensor

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @cached_property
    def first(self) -> int | None:
        """Where it begins in its array, if its elements follow each other there; else None."""
        if self.slot is not None:
            return 0
        place = self.piece.place
        first, end = flat_ends(place.block, place.shape)
        return first + place.first + self.start if end - first == place.block.size else None

    def values(self, state: State) -> Array:
        """Its values in a state: (size,) in the tensor's dtype, where they lie if they are together there, else copied.

        `state`: of any dtypes.
        """
        whole = state[self._array]
        if self.first is not None:
            return whole[self.first : self.first + self.size]
        shaped = whole.reshape(self.piece.place.shape)
        return np.concatenate([shaped[box.index].reshape(-1) for box in self.boxes()])

    def put(self, state: State, values: Array) -> None:
        """Write its values, (size,) in the tensor's dtype, into a state."""
        if self.first is not None:
            state[self._array][self.first : self.first + self.size] = values
            return
        shaped, at = state[self._array].reshape(self.piece.place.shape), 0
        for box in self.boxes():
            shaped[box.index] = values[at : at + box.size].reshape(box.shape)
            at += box.size

    def flat_indices(self, within: Array) -> Array:
        """Positions in the chunk, (n,) of integers, as positions in the whole tensor: (n,) int64."""
        if self.first is not None and self.slot is None:
            return within.astype(np.int64) + self.first
        return np.ravel_multi_index(self.coordinates(within), self.piece.place.shape).astype(np.int64)

    def coordinates(self, within: Array) -> tuple[Array, ...]:
        """Positions in the chunk, (n,) of integers, as coordinates in the whole tensor: (n,) int64 for each axis."""
        place = self.piece.place
        axes = np.unravel_index(within.astype(np.int64) + (place.first + self.start), place.block.shape)
        return tuple(axis + low for axis, low in zip(axes, place.block.start, strict=True))

    @property
    def _array(self) -> int:
        return self.tensor if self.slot is None else self.slot

    def boxes(self) -> Iterator[Box]:
        """The blocks of the whole tensor that its elements are, in their order."""
        place = self.piece.place
        for box in flat_boxes(place.block.shape, place.first + self.start, place.first + self.stop):
            yield box.shift(place.block.start)


def chunks_of(model: PublishedModel, rank: int) -> Iterator[StateChunk]:
    """The chunks of a rank's object, in their order."""
    number = 0
    for piece in model.pieces[rank]:
        for chunk in range(piece.chunking.count):
            yield StateChunk(number, piece, *piece.chunking.range(chunk))
            number += 1


class StateLayout:
    """Which chunks of a model a follower has in memory or in files, and which tensors it shows of them: all."""

    def __init__(self, model: PublishedModel) -> None:
        self.model = model
        self.tensors: Sequence[PublishedTensor] = model.tensors
        """The tensors as the follower shows them, by the number of the published one."""

    @cached_property
    def _chunks(self) -> Sequence[Sequence[StateChunk]]:
        """Of each rank, those that the follower has: listed once, since each step needs them."""
        return [tuple(chunks_of(self.model, rank)) for rank in range(len(self.model.pieces))]

    def chunks(self, rank: int) -> Sequence[StateChunk]:
        """The chunks of a rank's object that the follower has, in their order."""
        return self._chunks[rank]

    @cached_property
    def batches(self) -> Sequence[Sequence[Sequence[StateChunk]]]:
        """Of each rank, the chunks that a thread decodes at once, in their order."""
        itemsizes = [tensor.dtype.itemsize for tensor in self.model.tensors]
        result = list[list[Sequence[StateChunk]]]()
        for chunks in self._chunks:
            sizes = [chunk.size * itemsizes[chunk.tensor] for chunk in chunks]
            result.append([chunks[batch.start : batch.stop] for batch in batches_of(sizes)])
        return result

    def arrays(self) -> Iterator[tuple[int, DType]]:
        """The number of elements and the dtype of each array of a state."""
        for tensor in self.model.tensors:
            yield prod(tensor.shape), tensor.dtype

    def new_state(self) -> list[Array]:
        """Memory for a state: arrays (n,), each of the dtype of its tensors."""
        return [np.empty(size, dtype) for size, dtype in self.arrays()]

    @property
    def nbytes(self) -> int:
        """The bytes of a state."""
        return sum(size * dtype.itemsize for size, dtype in self.arrays())

    def can_continue(self, other: "StateLayout") -> bool:
        """Whether `in_order` can give a state of this layout to another one of the same tensors."""
        return True

    def in_order(self, state: State, other: "StateLayout") -> State:
        """A state of this layout as one of another, which may have the tensors in another order."""
        if self.model.tensors == other.model.tensors:
            return state
        by_name = {tensor.name: state[number] for number, tensor in enumerate(self.model.tensors)}
        return [by_name[tensor.name] for tensor in other.model.tensors]

    def values(self, number: int, state: State) -> Array:
        """A tensor, (shape) of its dtype, as the follower shows it: where its values lie if they are together there."""
        return state[number].reshape(self.tensors[number].shape)

    def indices(self, chunk: StateChunk, positions: Array | None) -> tuple[Array, Array | None]:
        """Where elements of a chunk lie in the tensor that is shown.

        positions: (n,) of integers in the chunk; None: all. Returns flat indices, (m,) int64, and which of the
        elements they are: (m,) int64 below n; None: all of them.
        """
        return chunk.flat_indices(np.arange(chunk.size) if positions is None else positions), None


def other_model(one: PublishedModel, other: PublishedModel, where: Path) -> UnsupportedError:
    """The error of a chain that publishes other tensors than before."""
    before, after = ({(t.name, t.dtype.name, t.shape) for t in model.tensors} for model in (one, other))
    name = min(before ^ after)[0]
    return UnsupportedError(
        f"publishes another model now: names, shapes or dtypes differ, such as those of {printable(name[:100])!r}",
        where=where,
        hint="If this is intended, follow it into a new target, or with accept_other_model=True.",
    )
