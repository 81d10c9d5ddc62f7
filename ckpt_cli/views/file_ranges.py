"""The ranges of the source's files that planned files are written from, as columns of numbers.

The ranges of a file are computed from those of whole tensors, which files of the same tensors share. No file is laid
out for them if the format does not need it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.format import Counts, FilePlan, TensorRanges
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import ArrayBlob, FileBlob, FlatRangeBlob, Tensor, ZeroBlob

_RECENT = 8
"""Lists of tensors whose columns are kept."""


@dataclass(frozen=True)
class FileRanges:
    """Ranges of files: each column is (ranges,) int64."""

    files: Counts
    """The number of the file."""
    starts: Counts
    """The first byte."""
    stops: Counts
    """The byte after the last one."""
    nbytes: Counts
    """How many of the bytes between them are values."""


@dataclass(frozen=True)
class _Columns:
    """What is known of a list of tensors: runs of elements that lie in a file without holes, and all other tensors."""

    tensors: Sequence[Tensor]
    others: tuple[int, ...]
    """The numbers of the tensors that are stored in another way."""
    owners: Counts
    """The number of the run's tensor."""
    firsts: Counts
    """Its first element, counted in C order."""
    sizes: Counts
    """Its number of elements."""
    files: Counts
    offsets: Counts
    """Where in the file it begins."""
    itemsizes: Counts


class SourceFiles:
    """The files of a source by number, and the ranges of them that planned files need."""

    def __init__(self) -> None:
        self.numbers: dict[Path, int] = {}
        self._recent: dict[int, _Columns] = {}

    def number(self, path: Path) -> int:
        """The number of a file."""
        return self.numbers.setdefault(path, len(self.numbers))

    def of(self, part: FilePlan) -> FileRanges:
        """The ranges that a new file is written from."""
        parts = [one for ranges in part.ranges() for one in self._of(ranges)]
        return FileRanges(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _of(self, ranges: TensorRanges) -> Iterator[tuple[Counts, ...]]:
        if ranges.is_whole:
            tensors = ranges.tensors
            yield self._listed(raw for t in tensors for fragment in t.fragments for raw in fragment.blob.sources())
            return
        columns = self._columns(ranges.tensors)
        low = np.maximum(ranges.starts[columns.owners] - columns.firsts, 0)
        high = np.minimum(ranges.stops[columns.owners] - columns.firsts, columns.sizes)
        chosen = np.flatnonzero(low < high)
        offsets, itemsizes = columns.offsets[chosen], columns.itemsizes[chosen]
        starts, stops = offsets + low[chosen] * itemsizes, offsets + high[chosen] * itemsizes
        yield columns.files[chosen], starts, stops, stops - starts
        parts = ((ranges.tensors[i], int(ranges.starts[i]), int(ranges.stops[i])) for i in columns.others)
        yield self._listed(raw for t, a, b in parts if a < b for raw in FlatRangeBlob(t, a, b).sources())

    def _listed(self, blobs: Iterator[FileBlob]) -> tuple[Counts, ...]:
        rows = [
            (self.number(one.path), one.offset, one.offset + one.span, prod(one.shape) * one.dtype.itemsize)
            for one in blobs
        ]
        return tuple(np.array(rows, np.int64).reshape(-1, 4).T)

    def _columns(self, tensors: Sequence[Tensor]) -> _Columns:
        columns = self._recent.get(id(tensors))
        if columns is None:
            while len(self._recent) >= _RECENT:
                self._recent.pop(next(iter(self._recent)))
            columns = self._recent[id(tensors)] = self._computed(tensors)
        return columns

    def _computed(self, tensors: Sequence[Tensor]) -> _Columns:
        rows: list[tuple[int, ...]] = []
        others: list[int] = []
        for i, tensor in enumerate(tensors):
            runs = _runs(tensor)
            if runs is None:
                others.append(i)
                continue
            rows += [
                (i, first, prod(blob.shape), self.number(blob.path), blob.offset, blob.dtype.itemsize)
                for first, blob in runs
            ]
        return _Columns(tensors, tuple(others), *np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 6).T))


def _runs(tensor: Tensor) -> list[tuple[int, FileBlob]] | None:
    """The first element, and the place in a file, of each block of a tensor and of its replicas.

    None if one of them is not a run of elements that lie in a file without holes.
    """
    runs = []
    for copy in (tensor, *tensor.replicas):
        for fragment in copy.fragments:
            blob = fragment.blob
            while isinstance(blob, DerivedBlob):
                blob = blob.base
            if isinstance(blob, (ZeroBlob, ArrayBlob)):
                continue
            first = _first_of_run(tensor.shape, fragment.box)
            if first is None or not isinstance(blob, FileBlob) or not blob.is_packed:
                return None
            runs.append((first, blob))
    return runs


def _first_of_run(shape: Shape, box: Box) -> int | None:
    """The first element of a block, in C order; None if elements of others lie between its own."""
    first = last = 0
    for length, start, stop in zip(shape, box.start, box.stop, strict=True):
        first, last = first * length + start, last * length + stop - 1
    return first if last + 1 - first == box.size else None
