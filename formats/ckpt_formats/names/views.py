"""Views of tensors that only move elements. Creating a view reads no data."""

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, slab
from ckpt_formats.core.tensor import Array, Blob, Fragment, Tensor, ZeroBlob, read

_WHOLE_ROWS = 16 << 10
"""Bytes of a row. Up to this size it is faster to read full rows than to start a read for some columns of each."""
_WINDOW = 1 << 20
"""Bytes of rows that are read at once."""


@dataclass(frozen=True)
class TransposedBlob(Blob):
    """A transposed block of a matrix `base`, (n, m)."""

    base: Blob
    box: Box
    """The block of `base`, before it is transposed."""

    @property
    def shape(self) -> Shape:
        return self.box.shape[::-1]

    @property
    def dtype(self) -> DType:
        return self.base.dtype

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
class SqueezedBlob(Blob):
    """A blob of shape (1, ...) without its first axis."""

    base: Blob

    @property
    def shape(self) -> Shape:
        return self.base.shape[1:]

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def crop(self, box: Box) -> "SqueezedBlob":
        return SqueezedBlob(self.base.crop(Box((0, *box.start), (1, *box.stop))))

    def read_into(self, out: Array, reader: Reader) -> None:
        self.base.read_into(out[None], reader)

    def parts(self) -> tuple[Blob, ...]:
        return (self.base,)


def unstacked(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors of shape (...) in a stack of shape (count, ...).

    Raises `UnsupportedError` for another shape.
    """
    if tensor.shape[:1] != (count,):
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} is not a stack of {count}")
    return tuple(Tensor.of(SqueezedBlob(tensor.crop(slab(tensor.shape, 0, i, i + 1)))) for i in range(count))


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


def stacked(tensors: Sequence[Tensor]) -> Tensor:
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


def transposed(tensor: Tensor) -> Tensor:
    """The transposed matrix, (m, n) for (n, m). Raises `UnsupportedError` if it is not a matrix."""
    if len(tensor.shape) != 2:
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} cannot be transposed")
    return Tensor.of(TransposedBlob(tensor, Box.whole(tensor.shape)))


def padded(tensor: Tensor, rows: int) -> Tensor:
    """A tensor with rows of zeros appended, so that it has `rows` rows."""
    if not tensor.shape or rows < tensor.shape[0]:
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} cannot be padded to {rows} rows")
    zeros = ZeroBlob((rows - tensor.shape[0], *tensor.shape[1:]), tensor.dtype)
    return stacked([tensor, Tensor.of(zeros)]) if zeros.shape[0] else tensor


@dataclass(frozen=True)
class StridedBlob(Blob):
    """Every `step`-th row of a blob, beginning with the first."""

    base: Blob
    step: int

    @property
    def shape(self) -> Shape:
        return (-(-self.base.shape[0] // self.step), *self.base.shape[1:])

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def crop(self, box: Box) -> "StridedBlob":
        low, high = box.start[0] * self.step, max(box.start[0], box.stop[0] - 1) * self.step
        rows = (low, high + 1) if box.start[0] < box.stop[0] else (low, low)
        return StridedBlob(self.base.crop(Box((rows[0], *box.start[1:]), (rows[1], *box.stop[1:]))), self.step)

    def read_into(self, out: Array, reader: Reader) -> None:
        if out.size:
            out[...] = read(self.base, reader)[:: self.step]

    def parts(self) -> tuple[Blob, ...]:
        return (self.base,)


def strided(tensor: Tensor, start: int, step: int) -> Tensor:
    """Every `step`-th row of a tensor, beginning with `start`.

    Raises `UnsupportedError` if the rows are not divisible.
    """
    if not tensor.shape or tensor.shape[0] % step:
        raise UnsupportedError(f"the rows of a tensor of shape {list(tensor.shape)} are not divisible by {step}")
    return Tensor.of(StridedBlob(tensor.crop(slab(tensor.shape, 0, start, tensor.shape[0])), step))
