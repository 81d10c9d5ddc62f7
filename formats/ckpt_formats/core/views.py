"""Views of tensors that only move elements: with other axes, rows or order. Creating a view reads no data."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from types import EllipsisType
from typing import NamedTuple

import numpy as np

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, flat_boxes, slab
from ckpt_formats.core.tensor import (
    Array,
    Blob,
    BlockBlob,
    FileBlob,
    FlatRangeBlob,
    Fragment,
    Tensor,
    ViewBlob,
    ZeroBlob,
    c_strides,
    from_fragments,
    is_c_order,
    read,
)

_WHOLE_ROWS = 16 << 10
"""Bytes of a row. Up to this size it is faster to read full rows than to start a read for some columns of each."""
_WINDOW = 1 << 20
"""Bytes of rows that are read at once."""
_TILE = 16 << 20
"""Bytes of rows of a transposed matrix that a reader caches. To read less than a 64th of a larger matrix is not worth
one."""
_FEW_GROUPS = 256
_FEW_FRAGMENTS = 1024
"""Up to so many groups of rows, and so many fragments in all, each group becomes fragments of its own."""


@dataclass(frozen=True)
class StackedBlob(ViewBlob):
    """A blob with a first axis of length 1."""

    @property
    def shape(self) -> Shape:
        return (1, *self.base.shape)

    def crop(self, box: Box) -> "StackedBlob":
        return StackedBlob(self.base.crop(Box(box.start[1:], box.stop[1:])))

    def read_into(self, out: Array, reader: Reader) -> None:
        self.base.read_into(out[0, ...], reader)


@dataclass(frozen=True)
class UnstackedBlob(ViewBlob):
    """A blob without its first axis, which has length 1."""

    @property
    def shape(self) -> Shape:
        return self.base.shape[1:]

    def crop(self, box: Box) -> "UnstackedBlob":
        return UnstackedBlob(self.base.crop(Box((0, *box.start), (1, *box.stop))))

    def read_into(self, out: Array, reader: Reader) -> None:
        self.base.read_into(out[None], reader)


@dataclass(frozen=True)
class PermutedBlob(ViewBlob):
    """A blob with its axes in another order: axis `i` is axis `axes[i]` of the base."""

    axes: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return tuple(self.base.shape[axis] for axis in self.axes)

    def crop(self, box: Box) -> "PermutedBlob":
        back = [self.axes.index(axis) for axis in range(len(self.axes))]
        inner = Box(tuple(box.start[i] for i in back), tuple(box.stop[i] for i in back))
        return PermutedBlob(self.base.crop(inner), self.axes)

    def read_into(self, out: Array, reader: Reader) -> None:
        out[...] = read(self.base, reader).transpose(self.axes)


@dataclass(frozen=True, eq=False)
class LayersBlob(Blob):
    """A blob of tensors of one shape, by new first axes: however many there are, a block of one is found at once.

    There may be none at a place, if nobody asks for what is there.
    """

    lengths: Shape
    """Of the new axes."""
    tensors: Mapping[Shape, Tensor]
    """By place along them; never empty."""

    @property
    def shape(self) -> Shape:
        return (*self.lengths, *self._first.shape)

    @property
    def dtype(self) -> DType:
        return self._first.dtype

    @property
    def reads_in_place(self) -> bool:
        return all(tensor.reads_in_place for tensor in self.tensors.values())

    def crop(self, box: Box) -> "LayersBlob":
        axes = len(self.lengths)
        rest = Box(box.start[axes:], box.stop[axes:])
        cut = Box(box.start[:axes], box.stop[:axes])
        tensors = {
            tuple(i - first for i, first in zip(place, cut.start, strict=True)): self.tensors[place].crop(rest)
            for place in product(*map(range, cut.start, cut.stop))
        }
        return LayersBlob(cut.shape, tensors)

    def read_into(self, out: Array, reader: Reader) -> None:
        for place, tensor in self.tensors.items():
            index: tuple[int | EllipsisType, ...] = (*place, ...)
            tensor.read_into(out[index], reader)

    def parts(self) -> tuple[Blob, ...]:
        return tuple(self.tensors.values())

    @property
    def _first(self) -> Tensor:
        return next(iter(self.tensors.values()))


@dataclass(frozen=True)
class ReshapedBlob(BlockBlob, ViewBlob):
    """A block of the tensor whose elements, in C order, are a vector's."""

    whole: Shape
    box: Box

    def read_into(self, out: Array, reader: Reader) -> None:
        if not is_c_order(self.shape, c_strides(self.whole, 1), 1):
            axis = next(axis for axis, length in enumerate(self.shape) if length != 1)
            for i in range(self.shape[axis]):  # its rows lie apart
                row = slab(self.shape, axis, i, i + 1)
                self.crop(row).read_into(out[row.index], reader)
            return
        at = sum(i * stride for i, stride in zip(self.box.start, c_strides(self.whole, 1), strict=True))
        run = self.base.crop(Box((at,), (at + self.box.size,)))
        if out.flags.c_contiguous:
            run.read_into(out.reshape(-1), reader)
        else:
            values = out.copy().reshape(-1)
            run.read_into(values, reader)
            out[...] = values.reshape(self.shape)


@dataclass(frozen=True)
class TransposedBlob(ViewBlob):
    """A transposed block of a matrix `base`, (n, m).

    Its rows are columns of `base`, so a few of its rows take values from all rows of `base`. A reader of few rows
    therefore caches a tile of many: whoever reads slab after slab reads `base` only a few times.
    """

    box: Box
    """The block of `base`, before it is transposed."""

    @property
    def shape(self) -> Shape:
        return self.box.shape[::-1]

    @property
    def reads_in_place(self) -> bool:
        return self.base.reads_in_place

    def crop(self, box: Box) -> "TransposedBlob":
        return TransposedBlob(self.base, Box(box.start[::-1], box.stop[::-1]).shift(self.box.start))

    def read_into(self, out: Array, reader: Reader) -> None:
        if not out.size:
            return
        is_small = out.nbytes < _TILE // 64 and prod(self.base.shape) * self.dtype.itemsize > _TILE
        if is_small or out.nbytes >= _TILE:
            self._read_directly(out, reader)
            return
        (first, low), (last, high) = self.box.start, self.box.stop
        tile_rows = max(1, _TILE // ((last - first) * self.dtype.itemsize))
        for number in range(low // tile_rows, -(-high // tile_rows)):
            columns = number * tile_rows, min((number + 1) * tile_rows, self.base.shape[1])
            tile = TransposedBlob(self.base, Box((first, columns[0]), (last, columns[1])))
            start, stop = max(low, columns[0]), min(high, columns[1])
            rows = out[start - low : stop - low]
            if (start, stop) == columns:
                tile._read_directly(rows, reader)
            else:
                rows[...] = tile._cached(reader)[start - columns[0] : stop - columns[0]]

    def parts(self) -> tuple[Blob, ...]:
        return (self.base.crop(self.box),)

    def _cached(self, reader: Reader) -> Array:
        def fill(buffer: Array) -> None:
            self._read_directly(buffer.view(self.dtype).reshape(self.shape), reader)

        tile = reader.cached_or_filled(("transposed", self), prod(self.shape) * self.dtype.itemsize, fill)
        return tile.view(self.dtype).reshape(self.shape)

    def _read_directly(self, out: Array, reader: Reader) -> None:
        (first, low), (last, high) = self.box.start, self.box.stop
        left, right = (
            (0, self.base.shape[1]) if self.base.shape[1] * self.dtype.itemsize <= _WHOLE_ROWS else (low, high)
        )
        step = max(1, _WINDOW // max((right - left) * self.dtype.itemsize, 1))
        for row in range(first, last, step):
            end = min(row + step, last)
            rows = read(self.base.crop(Box((row, left), (end, right))), reader)
            out[:, row - first : end - first] = rows[:, low - left : high - left].T


@dataclass(frozen=True)
class GroupRowsBlob(BlockBlob, ViewBlob):
    """A block of: some neighbouring rows of each group of a blob's rows, group after group."""

    axis: int
    """The axis that counts the rows."""
    step: int
    """Rows from the first row that is wanted in one group to that in the next. The blob begins with the first one."""
    rows: int
    """Rows that are wanted in each group."""
    box: Box

    @property
    def reads_in_place(self) -> bool:
        return self.base.reads_in_place

    def read_into(self, out: Array, reader: Reader) -> None:
        axis, line = self.axis, _line_nbytes(self)
        if axis and line * self.step > _WINDOW and out.shape[0] > 1:
            middle = out.shape[0] // 2
            for box in (slab(out.shape, 0, 0, middle), slab(out.shape, 0, middle, out.shape[0])):
                self.crop(box).read_into(out[box.index], reader)
            return
        for run in self._runs(max(1, _WINDOW // max(line * self.step, 1))):
            target = out[slab(out.shape, axis, run.target, run.target + run.groups * run.rows).index]
            source = self._source(run)
            if run.groups == 1:
                source.read_into(target, reader)
                continue
            values = read(source, reader)
            apart, together = values.strides[axis] * self.step, values.strides[axis]
            grouped = (*out.shape[:axis], run.groups, run.rows, *out.shape[axis + 1 :])
            strides = (*values.strides[:axis], apart, together, *values.strides[axis + 1 :])
            target.reshape(grouped)[...] = np.ndarray(grouped, self.dtype, values, 0, strides)

    def parts(self) -> tuple[Blob, ...]:
        return tuple(self._source(run) for run in self._runs(self.base.shape[self.axis]))

    def _runs(self, most: int) -> "Iterator[_RowRun]":
        return _runs(self.box.start[self.axis], self.box.stop[self.axis], self.rows, most)

    def _source(self, run: "_RowRun") -> Blob:
        """From the first row of a run of groups to the last, with those between that are not wanted."""
        start, stop, at = list(self.box.start), list(self.box.stop), run.group * self.step + run.first
        start[self.axis], stop[self.axis] = at, at + (run.groups - 1) * self.step + run.rows
        return self.base.crop(Box(tuple(start), tuple(stop)))


@dataclass(frozen=True)
class InterleavedBlob(BlockBlob):
    """A block of: the rows of several blobs by groups, in each of them those of the first blob, then of the next."""

    blobs: tuple[Blob, ...]
    """Alike but for their numbers of rows, (groups * rows, ...)."""
    groups: int
    box: Box

    @property
    def dtype(self) -> DType:
        return self.blobs[0].dtype

    @property
    def reads_in_place(self) -> bool:
        return all(blob.reads_in_place for blob in self.blobs)

    def read_into(self, out: Array, reader: Reader) -> None:
        group = sum(rows for _, rows, _ in self._members())
        for run in self._runs(max(1, _WINDOW // max(_line_nbytes(self) * group, 1))):
            target = out[run.target : run.target + run.groups * run.rows]
            for source, start, stop in self._sources(run):
                if run.groups == 1:
                    source.read_into(target[start:stop], reader)
                    continue
                values = read(source, reader).reshape(run.groups, stop - start, *out.shape[1:])
                target.reshape(run.groups, group, *out.shape[1:])[:, start:stop] = values

    def parts(self) -> tuple[Blob, ...]:
        return tuple(source for run in self._runs(self.groups) for source, _, _ in self._sources(run))

    def _members(self) -> "Iterator[tuple[Blob, int, int]]":
        """The blobs, each with its rows in a group, and those of the ones before it."""
        at = 0
        for blob in self.blobs:
            rows = blob.shape[0] // self.groups
            yield blob, rows, at
            at += rows

    def _runs(self, most: int) -> "Iterator[_RowRun]":
        return _runs(self.box.start[0], self.box.stop[0], sum(rows for _, rows, _ in self._members()), most)

    def _sources(self, run: "_RowRun") -> "Iterator[tuple[Blob, int, int]]":
        """Blobs with rows in a run: these rows, and in which rows of each group of the run they are."""
        for blob, rows, before in self._members():
            start, stop = max(run.first, before), min(run.first + run.rows, before + rows)
            if start < stop:
                low, high = run.group * rows + start - before, (run.group + run.groups - 1) * rows + stop - before
                box = Box((low, *self.box.start[1:]), (high, *self.box.stop[1:]))
                yield blob.crop(box), start - run.first, stop - run.first


class _RowRun(NamedTuple):
    """Rows of neighbouring groups: of whole groups, or some rows of one group."""

    group: int
    """The first group."""
    groups: int
    first: int
    """The first row in each group."""
    rows: int
    """The number of rows in each group."""
    target: int
    """How many rows come before."""


def _runs(low: int, high: int, rows: int, most: int) -> Iterator[_RowRun]:
    """Cut rows `low` to `high` of groups of `rows` rows each into runs of at most `most` whole groups."""
    at = low
    while at < high:
        group, first = divmod(at, rows)
        whole = first == 0 and high - at >= rows
        groups, taken = (min(most, (high - at) // rows), rows) if whole else (1, min(rows - first, high - at))
        yield _RowRun(group, groups, first, taken, at - low)
        at += groups * taken


def _line_nbytes(blob: GroupRowsBlob | InterleavedBlob) -> int:
    """The bytes of the values of a block with one index of the axis that counts the rows."""
    axis = blob.axis if isinstance(blob, GroupRowsBlob) else 0
    return prod(blob.shape[:axis] + blob.shape[axis + 1 :]) * blob.dtype.itemsize


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape, by a new first axis."""
    parts = (
        Fragment(Box((i, *f.box.start), (i + 1, *f.box.stop)), StackedBlob(f.blob))
        for i, one in enumerate(tensors)
        for f in one.fragments
    )
    return from_fragments((len(tensors), *tensors[0].shape), parts, tensors[0].dtype)


def unstacked(tensor: Tensor, index: int) -> Tensor:
    """One of the tensors that lie along the first axis."""
    cut = tensor.crop(slab(tensor.shape, 0, index, index + 1))
    parts = (Fragment(Box(f.box.start[1:], f.box.stop[1:]), _unstacked(f.blob)) for f in cut.fragments)
    return Tensor(tensor.shape[1:], tensor.dtype, tuple(parts), tuple(unstacked(r, index) for r in tensor.replicas))


def unstacked_all(tensor: Tensor) -> list[Tensor]:
    """All tensors that lie along the first axis, in one pass over the fragments."""
    shape = tensor.shape[1:]
    parts: list[list[Fragment]] = [[] for _ in range(tensor.shape[0])]
    for fragment in tensor.fragments:
        for i in range(fragment.box.start[0], fragment.box.stop[0]):
            one = fragment.crop(slab(tensor.shape, 0, i, i + 1))
            if one is not None:
                parts[i].append(Fragment(Box(one.box.start[1:], one.box.stop[1:]), _unstacked(one.blob)))
    replicas = zip(*(unstacked_all(replica) for replica in tensor.replicas), strict=True)
    results = [_whole_or(Tensor(shape, tensor.dtype, tuple(fragments))) for fragments in parts]
    if not tensor.replicas:
        return results
    return [replace(one, replicas=(*one.replicas, *others)) for one, others in zip(results, replicas, strict=True)]


def _whole_or(tensor: Tensor) -> Tensor:
    """The tensor that is the only fragment of another; any other tensor itself."""
    inner = tensor.fragments[0].blob if len(tensor.fragments) == 1 else None
    return inner if isinstance(inner, Tensor) and inner.shape == tensor.shape else tensor


def rows_of(tensor: Tensor, blocks: Sequence[tuple[int, int]]) -> Tensor:
    """The concatenated ranges (start, stop) of a tensor's first axis."""
    shape = (sum(stop - start for start, stop in blocks), *tensor.shape[1:])
    fragments: list[Fragment] = []
    at = 0
    for start, stop in blocks:
        target = slab(shape, 0, at, at + stop - start)
        fragments.extend(tensor.placed(slab(tensor.shape, 0, start, stop), target))
        at += stop - start
    return Tensor(shape, tensor.dtype, tuple(fragments), tuple(rows_of(one, blocks) for one in tensor.replicas))


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors concatenated along the first axis. Raises `UnsupportedError` if other axes or dtypes differ."""
    shape, dtype = _concatenated_shape(tensors), tensors[0].dtype
    fragments: list[Fragment] = []
    at = 0
    for tensor in tensors:
        fragments.extend(tensor.placed(Box.whole(tensor.shape), slab(shape, 0, at, at + tensor.shape[0])))
        at += tensor.shape[0]
    return Tensor(shape, dtype, tuple(fragments), tuple(map(concatenated, _replicas(tensors))))


def _concatenated_shape(tensors: Sequence[Tensor]) -> Shape:
    first = tensors[0]
    if any((tensor.shape[1:], tensor.dtype) != (first.shape[1:], first.dtype) for tensor in tensors):
        alike = all(tensor.dtype == first.dtype for tensor in tensors)
        what = f"shapes {[list(t.shape) for t in tensors]}" if alike else f"types {[t.dtype.name for t in tensors]}"
        raise UnsupportedError(f"tensors of {what} cannot be concatenated")
    return (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])


def _replicas(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, each time with other replicas in the place of those that have some: until all are used."""
    for i in range(max(len(tensor.replicas) for tensor in tensors)):
        yield [t.replicas[i] if i < len(t.replicas) else replace(t, replicas=()) for t in tensors]


def padded(tensor: Tensor, rows: int) -> Tensor:
    """A tensor with rows of zeros appended, so that it has `rows` rows."""
    if not tensor.shape or rows < tensor.shape[0]:
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} cannot be padded to {rows} rows")
    zeros = ZeroBlob((rows - tensor.shape[0], *tensor.shape[1:]), tensor.dtype)
    return concatenated([tensor, Tensor.of(zeros)]) if zeros.shape[0] else tensor


def group_rows(tensor: Tensor, groups: int, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` of each of equal groups of a tensor's rows: (groups * (stop - start), ...).

    Raises `UnsupportedError` if the rows are not divisible.
    """
    _check_divisible(tensor, groups)
    base = _transposed_base(tensor)
    if base is not None:
        return transposed(_group_rows(base, 1, groups, start, stop))
    return _group_rows(tensor, 0, groups, start, stop)


def interleaved(tensors: Sequence[Tensor], groups: int) -> Tensor:
    """The rows of several tensors in groups: in each group rows of the first tensor, then of the next, and so on.

    Raises `UnsupportedError` if the rows are not divisible, or if other axes or dtypes differ.
    """
    for tensor in tensors:
        _check_divisible(tensor, groups)
    if groups == 1:
        return concatenated(tensors)
    fragments = sum(len(tensor.fragments) for tensor in tensors)
    if groups <= _FEW_GROUPS and groups * fragments <= _FEW_FRAGMENTS:
        each = [(tensor, tensor.shape[0] // groups) for tensor in tensors]
        return concatenated([rows_of(t, [(g * rows, (g + 1) * rows)]) for g in range(groups) for t, rows in each])
    return Tensor.of(InterleavedBlob(tuple(tensors), groups, Box.whole(_concatenated_shape(tensors))))


def pairs_of_rotary(tensor: Tensor, heads: int) -> Tensor:
    """Rows of `heads` heads, each in two halves, with row i of both halves next to each other: (rows, ...).

    Raises `UnsupportedError` if the rows are not divisible.
    """
    _check_divisible(tensor, 2 * heads)
    half = tensor.shape[0] // (2 * heads)
    parts = [group_rows(tensor, heads, i * half, (i + 1) * half) for i in range(2)]
    return interleaved(parts, heads * half) if half else tensor


def halves_of_rotary(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of `pairs_of_rotary`: in each head the even rows, then the odd ones."""
    _check_divisible(tensor, 2 * heads)
    half = tensor.shape[0] // (2 * heads)
    if half and len(tensor.fragments) == 1 and isinstance(tensor.fragments[0].blob, TransposedBlob):
        # Rows of a transposed matrix are read one value at a time: its columns are put in order before.
        columns = tensor.shape[1]
        untransposed = with_shape(transposed(tensor), (columns, heads, half, 2))
        return transposed(with_shape(permuted(untransposed, (0, 1, 3, 2)), (columns, tensor.shape[0])))
    parts = [group_rows(tensor, heads * half, i, i + 1) for i in range(2)] if half else []
    return interleaved(parts, heads) if half else tensor


def _check_divisible(tensor: Tensor, groups: int) -> None:
    if not tensor.shape or groups < 1 or tensor.shape[0] % groups:
        raise UnsupportedError(f"the rows of a tensor of shape {list(tensor.shape)} are not divisible by {groups}")


def _group_rows(tensor: Tensor, axis: int, groups: int, start: int, stop: int) -> Tensor:
    step = tensor.shape[axis] // groups
    shape = (*tensor.shape[:axis], groups * (stop - start), *tensor.shape[axis + 1 :])
    replicas = tuple(_group_rows(replica, axis, groups, start, stop) for replica in tensor.replicas)
    if stop - start == 1:
        parts = [part for fragment in tensor.fragments if (part := _every_row(fragment, axis, step, start)) is not None]
    elif groups <= _FEW_GROUPS and groups * len(tensor.fragments) <= _FEW_FRAGMENTS:
        places = [slab(tensor.shape, axis, g * step + start, g * step + stop) for g in range(groups)]
        parts = [
            part
            for g, place in enumerate(places)
            for part in tensor.placed(place, slab(shape, axis, g * (stop - start), (g + 1) * (stop - start)))
        ]
    else:
        base = tensor.crop(slab(tensor.shape, axis, start, tensor.shape[axis] - step + stop))
        blob = GroupRowsBlob(replace(base, replicas=()), axis, step, stop - start, Box.whole(shape))
        parts = [Fragment(blob.box, blob)]
    return Tensor(shape, tensor.dtype, tuple(parts), replicas)


def _every_row(fragment: Fragment, axis: int, step: int, start: int) -> Fragment | None:
    """What a fragment has of rows `start`, `start + step`, and so on, which count as rows 0, 1, and so on."""
    low, high = (-((start - end[axis]) // step) for end in (fragment.box.start, fragment.box.stop))
    if low >= high:
        return None
    box = Box(
        (*fragment.box.start[:axis], low, *fragment.box.start[axis + 1 :]),
        (*fragment.box.stop[:axis], high, *fragment.box.stop[axis + 1 :]),
    )
    first = low * step + start - fragment.box.start[axis]
    blob = fragment.blob.crop(slab(fragment.box.shape, axis, first, first + (high - low - 1) * step + 1))
    if isinstance(blob, FileBlob):
        strides = (*blob.strides[:axis], blob.strides[axis] * step, *blob.strides[axis + 1 :])
        return Fragment(box, replace(blob, shape=box.shape, strides=strides))
    return Fragment(box, GroupRowsBlob(blob, axis, step, 1, Box.whole(box.shape)))


def flat_vector(parts: Iterable[tuple[Tensor, int, int, int]], length: int, dtype: DType) -> Tensor:
    """The vector (length,) that has elements `start` to `stop` of flattened tensors, and zeros between them.

    parts: (tensor, start, stop, place in the vector), in ascending order of the places; no part is empty.
    """
    fragments, at = list[Fragment](), 0
    for tensor, start, stop, place in parts:
        if at < place:
            fragments.append(Fragment(Box((at,), (place,)), ZeroBlob((place - at,), dtype)))
        at = place + stop - start
        fragments.append(Fragment(Box((place,), (at,)), FlatRangeBlob(tensor, start, stop)))
    if at < length:
        fragments.append(Fragment(Box((at,), (length,)), ZeroBlob((length - at,), dtype)))
    return Tensor((length,), dtype, tuple(fragments))


def reshaped(vector: Tensor, start: int, shape: Shape) -> Tensor:
    """The tensor whose elements, in C order, are a vector's from `start` on."""
    cut = vector.crop(Box((start,), (start + prod(shape),)))
    return from_fragments(shape, _reshaped(cut, shape), vector.dtype)


def with_shape(tensor: Tensor, shape: Shape) -> Tensor:
    """The tensor with its elements, in C order, under another shape of the same size."""
    blob = tensor.fragments[0].blob if len(tensor.fragments) == 1 else None
    if isinstance(blob, FileBlob) and not tensor.replicas and blob.shape == tensor.shape and blob.is_packed:
        return Tensor.of(blob.shaped(shape))
    return reshaped(Tensor.of(FlatRangeBlob(tensor, 0, tensor.size)), 0, shape)


def permuted(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """The tensor with axis `axes[i]` of it as axis `i`."""
    return Tensor.of(PermutedBlob(tensor, tuple(axes)))


def transposed(tensor: Tensor) -> Tensor:
    """The transposed matrix, (m, n) for (n, m). Raises `UnsupportedError` if it is not a matrix."""
    if len(tensor.shape) != 2:
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} cannot be transposed")
    base = _transposed_base(tensor)
    return base if base is not None else Tensor.of(TransposedBlob(tensor, Box.whole(tensor.shape)))


def _transposed_base(tensor: Tensor) -> Tensor | None:
    """The matrix that a tensor is the transposed one of; None if it is something else."""
    blob = tensor.fragments[0].blob if type(tensor.fragments) is tuple and len(tensor.fragments) == 1 else None
    if not isinstance(blob, TransposedBlob) or tensor.replicas or blob.shape != tensor.shape:
        return None
    return Tensor.of(blob.base).crop(blob.box)


def transposed_in_file(tensor: Tensor) -> Tensor:
    """A matrix that lies plainly in a file, with its axes exchanged."""
    parts = (Fragment(Box(f.box.start[::-1], f.box.stop[::-1]), _transposed(f.blob)) for f in tensor.fragments)
    return from_fragments(tensor.shape[::-1], parts, tensor.dtype)


def _transposed(blob: Blob) -> FileBlob:
    if not isinstance(blob, FileBlob):
        raise UnsupportedError("a matrix that does not lie plainly in a file cannot be transposed")
    return FileBlob(blob.path, blob.offset, blob.shape[::-1], blob.dtype, blob.strides[::-1], blob.seal)


def _reshaped(vector: Tensor, shape: Shape) -> Iterator[Fragment]:
    for fragment in vector.fragments:
        at = 0
        for box in flat_boxes(shape, fragment.box.start[0], fragment.box.stop[0]):
            run = fragment.blob.crop(Box((at,), (at + box.size,)))
            yield Fragment(box, _shaped(run, box.shape))
            at += box.size


def _shaped(run: Blob, shape: Shape) -> Blob:
    if isinstance(run, FileBlob) and is_c_order(run.shape, run.strides, run.dtype.itemsize):
        return run.shaped(shape)
    return ReshapedBlob(run, shape, Box.whole(shape))


def _unstacked(blob: Blob) -> Blob:
    if isinstance(blob, FileBlob):
        return FileBlob(blob.path, blob.offset, blob.shape[1:], blob.dtype, blob.strides[1:], blob.seal)
    if isinstance(blob, LayersBlob) and blob.lengths == (1,):
        return blob.tensors[(0,)]
    return blob.base if isinstance(blob, StackedBlob) else UnstackedBlob(blob)
