"""A state in memory: each tensor whole, in C order, and where the chunks of the published pieces lie in it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box, flat_boxes, flat_ends
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import printable
from ckpt_formats.universal.published.model import PublishedModel, TensorPiece

State = Sequence[Array] | Mapping[int, Array]
"""The values of each tensor of a model by its number: (elements,) in its dtype, contiguous."""


@dataclass(frozen=True)
class StateChunk:
    """A chunk of a rank's state: a range of the elements of a piece, in C order."""

    number: int
    """Within the rank's object."""
    piece: TensorPiece
    start: int
    stop: int

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
        """Where it begins in its tensor, if its elements follow each other there; else None."""
        place = self.piece.place
        first, end = flat_ends(place.block, place.shape)
        return first + place.first + self.start if end - first == place.block.size else None

    def values(self, state: State) -> Array:
        """Its values in a state: (size,) in the tensor's dtype, where they lie if they are together there, else copied.

        `state`: of any dtypes.
        """
        whole = state[self.tensor]
        if self.first is not None:
            return whole[self.first : self.first + self.size]
        shaped = whole.reshape(self.piece.place.shape)
        return np.concatenate([shaped[box.index].reshape(-1) for box in self._boxes()])

    def put(self, state: State, values: Array) -> None:
        """Write its values, (size,) in the tensor's dtype, into a state."""
        if self.first is not None:
            state[self.tensor][self.first : self.first + self.size] = values
            return
        shaped, at = state[self.tensor].reshape(self.piece.place.shape), 0
        for box in self._boxes():
            shaped[box.index] = values[at : at + box.size].reshape(box.shape)
            at += box.size

    def flat_indices(self, within: Array) -> Array:
        """Positions in the chunk, (n,) of integers, as positions in the whole tensor: (n,) int64."""
        if self.first is not None:
            return within.astype(np.int64) + self.first
        place = self.piece.place
        axes = np.unravel_index(within.astype(np.int64) + (place.first + self.start), place.block.shape)
        shifted = tuple(axis + low for axis, low in zip(axes, place.block.start, strict=True))
        return np.ravel_multi_index(shifted, place.shape).astype(np.int64)

    def _boxes(self) -> Iterator[Box]:
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


def new_state(model: PublishedModel) -> list[Array]:
    """Memory for a state of a model: for each tensor (elements,) of its dtype."""
    return [np.empty(prod(tensor.shape), tensor.dtype) for tensor in model.tensors]


def in_order(state: State, model: PublishedModel, other: PublishedModel) -> State:
    """A state of a model, whose tensors are those of another one in another order, in that order."""
    if model.tensors == other.tensors:
        return state
    by_name = {tensor.name: state[number] for number, tensor in enumerate(model.tensors)}
    return [by_name[tensor.name] for tensor in other.tensors]


def other_model(one: PublishedModel, other: PublishedModel, where: Path) -> UnsupportedError:
    """The error of a chain that publishes other tensors than before."""
    before, after = ({(t.name, t.dtype.name, t.shape) for t in model.tensors} for model in (one, other))
    name = min(before ^ after)[0]
    return UnsupportedError(
        f"publishes another model now: names, shapes or dtypes differ, such as those of {printable(name[:100])!r}",
        where=where,
        hint="If this is intended, follow it into a new target, or with accept_other_model=True.",
    )
