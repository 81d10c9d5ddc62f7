"""Views of tensors that only move elements: with other axes, rows or order. Creating a view reads no data."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from types import EllipsisType

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
    """A transposed block of a matrix `base`, (n, m)."""

    box: Box
    """The block of `base`, before it is transposed."""

    @property
    def shape(self) -> Shape:
        return self.box.shape[::-1]

    def crop(self, box: Box) -> "TransposedBlob":
        return TransposedBlob(self.base, Box(box.start[::-1], box.stop[::-1]).shift(self.box.start))

    def read_into(self, out: Array, reader: Reader) -> None:
        rows, columns = self.base.shape
        if columns * self.dtype.itemsize > _WHOLE_ROWS:
            self.base.crop(self.box).read_into(out.T, reader)
            return
        (first, start_column), (last, stop_column) = self.box.start, self.box.stop
        step = max(1, _WINDOW // max(columns * self.dtype.itemsize, 1))
        for row in range(first, last, step):
            end = min(row + step, last)
            rows_read = read(self.base.crop(slab((rows, columns), 0, row, end)), reader)
            out[:, row - first : end - first] = rows_read[:, start_column:stop_column].T

    def parts(self) -> tuple[Blob, ...]:
        return (self.base.crop(self.box),)


@dataclass(frozen=True)
class StridedBlob(ViewBlob):
    """Every `step`-th row of a blob, beginning with the first."""

    step: int

    @property
    def shape(self) -> Shape:
        return (-(-self.base.shape[0] // self.step), *self.base.shape[1:])

    def crop(self, box: Box) -> "StridedBlob":
        low, high = box.start[0] * self.step, max(box.start[0], box.stop[0] - 1) * self.step
        rows = (low, high + 1) if box.start[0] < box.stop[0] else (low, low)
        return StridedBlob(self.base.crop(Box((rows[0], *box.start[1:]), (rows[1], *box.stop[1:]))), self.step)

    def read_into(self, out: Array, reader: Reader) -> None:
        if out.size:
            out[...] = read(self.base, reader)[:: self.step]


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
    return [Tensor(shape, tensor.dtype, tuple(fragments)) for fragments in parts]


def split_stack(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors of shape (...) in a stack of shape (count, ...).

    Raises `UnsupportedError` for another shape.
    """
    if tensor.shape[:1] != (count,):
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} is not a stack of {count}")
    return tuple(Tensor.of(UnstackedBlob(tensor.crop(slab(tensor.shape, 0, i, i + 1)))) for i in range(count))


def rows_of(tensor: Tensor, blocks: Sequence[tuple[int, int]]) -> Tensor:
    """The concatenated ranges (start, stop) of a tensor's first axis."""
    shape = (sum(stop - start for start, stop in blocks), *tensor.shape[1:])
    fragments: list[Fragment] = []
    at = 0
    for start, stop in blocks:
        target = slab(shape, 0, at, at + stop - start)
        fragments.extend(tensor.placed(slab(tensor.shape, 0, start, stop), target))
        at += stop - start
    return Tensor(shape, tensor.dtype, tuple(fragments))


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors concatenated along the first axis. Raises `UnsupportedError` if other axes or dtypes differ."""
    first = tensors[0]
    if any((tensor.shape[1:], tensor.dtype) != (first.shape[1:], first.dtype) for tensor in tensors):
        raise UnsupportedError(f"tensors of shapes {[list(tensor.shape) for tensor in tensors]} cannot be concatenated")
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    fragments: list[Fragment] = []
    at = 0
    for tensor in tensors:
        fragments.extend(tensor.placed(Box.whole(tensor.shape), slab(shape, 0, at, at + tensor.shape[0])))
        at += tensor.shape[0]
    return Tensor(shape, first.dtype, tuple(fragments))


def padded(tensor: Tensor, rows: int) -> Tensor:
    """A tensor with rows of zeros appended, so that it has `rows` rows."""
    if not tensor.shape or rows < tensor.shape[0]:
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} cannot be padded to {rows} rows")
    zeros = ZeroBlob((rows - tensor.shape[0], *tensor.shape[1:]), tensor.dtype)
    return concatenated([tensor, Tensor.of(zeros)]) if zeros.shape[0] else tensor


def strided(tensor: Tensor, start: int, step: int) -> Tensor:
    """Every `step`-th row of a tensor, beginning with `start`.

    Raises `UnsupportedError` if the rows are not divisible.
    """
    if not tensor.shape or tensor.shape[0] % step:
        raise UnsupportedError(f"the rows of a tensor of shape {list(tensor.shape)} are not divisible by {step}")
    return Tensor.of(StridedBlob(tensor.crop(slab(tensor.shape, 0, start, tensor.shape[0])), step))


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


def permuted(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """The tensor with axis `axes[i]` of it as axis `i`."""
    return Tensor.of(PermutedBlob(tensor, tuple(axes)))


def transposed(tensor: Tensor) -> Tensor:
    """The transposed matrix, (m, n) for (n, m). Raises `UnsupportedError` if it is not a matrix."""
    if len(tensor.shape) != 2:
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} cannot be transposed")
    return Tensor.of(TransposedBlob(tensor, Box.whole(tensor.shape)))


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
    return blob.base if isinstance(blob, StackedBlob) else UnstackedBlob(blob)
