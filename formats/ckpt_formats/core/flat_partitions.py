"""Tensors in flat buffers that are split over ranks, as ZeRO and FSDP1 do. Arithmetic only.

Of a tensor that is split evenly over all ranks, as at ZeRO stage 3, no fragment is kept: a thousand ranks, ten thousand
parameters and three states are thirty million. A block of the tensor is in the slices of a few ranks, which follow from
its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.geometry import Box, Shape, flat_boxes, flat_ends
from ckpt_formats.core.tensor import ComputedFragments, FileBlob, Fragment, Tensor, c_strides, from_fragments

_Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True, unsafe_hash=True)
class EvenSlices(ComputedFragments):
    """The slices of one tensor: rank r has `size` elements from element `r * size` on, the last ranks fewer, or none.

    A slice is at most 2n - 1 fragments, where n is the number of axes.
    """

    shape: Shape
    vectors: tuple[FileBlob, ...] = field(hash=False, repr=False)
    """What each rank stores, (elements,): all of one dtype, and without holes. Tensors of the same vectors share it."""
    at: int
    """The element of each vector at which its slice begins."""
    size: int

    def __len__(self) -> int:
        return _count(self.shape, self.size, len(self.vectors))

    def __bool__(self) -> bool:
        return bool(self.vectors and self.size and prod(self.shape))

    def __iter__(self) -> Iterator[Fragment]:
        return self._of_ranks(0, len(self.vectors))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._sliced(index)
        item = next(islice(self, index if index >= 0 else len(self) + index, None), None)
        if item is None:
            raise IndexError(index)
        return item

    def _sliced(self, index: slice) -> tuple[Fragment, ...]:
        places = (index.start, index.stop, index.step)
        if all(place is None or place >= 0 for place in places):
            return tuple(islice(self, *places))
        return tuple(self)[index]

    def around(self, box: Box) -> Iterator[Fragment]:
        low, high = flat_ends(box, self.shape)
        return self._of_ranks(low // self.size, -(-high // self.size)) if low < high and self.size else iter(())

    def fill(self, shape: Shape, dtype: DType) -> bool:
        is_of = shape == self.shape and (not self.vectors or self.vectors[0].dtype == dtype)
        return is_of and self.size * len(self.vectors) >= prod(shape)

    def paths(self) -> Iterator[Path]:
        return (vector.path for vector in self.vectors)

    @property
    def source(self) -> object:
        return self.vectors

    def _of_ranks(self, first: int, stop: int) -> Iterator[Fragment]:
        total = prod(self.shape)
        for rank in range(first, min(stop, len(self.vectors))):
            low, high = rank * self.size, min((rank + 1) * self.size, total)
            if low >= high:
                return
            vector = self.vectors[rank]
            itemsize = vector.dtype.itemsize
            offset = vector.offset + self.at * itemsize
            for box in flat_boxes(self.shape, low, high):
                shape = box.shape
                strides = c_strides(shape, itemsize)
                yield Fragment(box, FileBlob(vector.path, offset, shape, vector.dtype, strides, vector.seal))
                offset += prod(shape) * itemsize


def even_tensor(shape: Shape, vectors: tuple[FileBlob, ...], at: int, size: int) -> Tensor:
    """The tensor of which each rank has `size` elements, from element `at` of its vector on; the rest is padding.

    The vectors are of one dtype, have at least `at + size` elements each, and lie without holes.
    """
    return Tensor(shape, vectors[0].dtype, EvenSlices(shape, vectors, at, size))


@lru_cache(4096)
def _count(shape: Shape, size: int, slices: int) -> int:
    """How many fragments there are: the blocks of all ranges (see `flat_boxes`)."""
    total = prod(shape)
    if not size or not total:
        return 0
    starts = np.arange(min(slices, -(-total // size)), dtype=np.int64) * size
    return int(_boxes(shape, starts, np.minimum(starts + size, total)).sum())


def _boxes(shape: Sequence[int], starts: _Counts, stops: _Counts) -> _Counts:
    """How many blocks each flat range of a shape is: (ranges,) int64. Empty ranges are none."""
    filled = starts < stops
    if len(shape) < 2:
        return filled.astype(np.int64)
    row = prod(shape[1:])
    first, last = -(-starts // row), stops // row
    head, tail = starts % row, stops % row
    ends = head + np.minimum(stops, first * row) - starts
    counts = _boxes(shape[1:], head, np.where(head > 0, ends, head))
    counts += first < last
    counts += _boxes(shape[1:], np.zeros_like(tail), np.where(last >= first, tail, 0))
    return np.where(filled, counts, 0)


@dataclass(frozen=True)
class FlatPiece:
    """A rank's part of a flat buffer: a vector (n,), and the element of the buffer at which it begins."""

    begin: int
    vector: FileBlob


def tensor_in(shape: Shape, dtype: DType, begin: int, pieces: Iterable[FlatPiece]) -> Tensor:
    """The tensor of `shape` that is stored from element `begin` on in a flat buffer with these parts. Lazy."""
    return from_fragments(shape, _fragments(shape, begin, pieces), dtype)


def _fragments(shape: Shape, begin: int, pieces: Iterable[FlatPiece]) -> Iterator[Fragment]:
    end = begin + prod(shape)
    for piece in pieces:
        low, high = max(begin, piece.begin), min(end, piece.begin + piece.vector.shape[0])
        at = low - piece.begin
        for box in flat_boxes(shape, low - begin, max(low, high) - begin):
            yield Fragment(box, piece.vector.flat(at, at + box.size).shaped(box.shape))
            at += box.size
