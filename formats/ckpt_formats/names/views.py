"""Tensors made of other tensors by moving elements, and no more. Nothing is read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, slab
from ckpt_formats.core.tensor import Array, Blob, FileBlob, Fragment, Tensor, ZeroBlob, read

_WHOLE_ROWS = 16 << 10
"""Bytes of a row up to which it is faster to read all of it than to begin a read for some of its columns."""
_WINDOW = 1 << 20


@dataclass(frozen=True)
class TransposedBlob:
    """A block of a matrix with its axes exchanged."""

    base: Blob
    box: Box
    """The block, before the exchange."""

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
        (first, left), (last, right) = self.box.start, self.box.stop
        step = max(1, _WINDOW // max(columns * self.dtype.itemsize, 1))
        for row in range(first, last, step):
            end = min(row + step, last)
            whole = read(self.base.crop(slab((rows, columns), 0, row, end)), reader)
            out[:, row - first : end - first] = whole[:, left:right].T

    def sources(self) -> Iterator[FileBlob]:
        return self.base.crop(self.box).sources()

    def problems(self) -> Iterator[str]:
        return self.base.problems()


@dataclass(frozen=True)
class SqueezedBlob:
    """What a blob holds whose first axis has one place, without that axis."""

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

    def sources(self) -> Iterator[FileBlob]:
        return self.base.sources()

    def problems(self) -> Iterator[str]:
        return self.base.problems()


def unstacked(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """The tensors of which one is a stack, along its first axis."""
    if tensor.shape[:1] != (count,):
        raise Unsupported(f"a tensor of shape {list(tensor.shape)} is no stack of {count}")
    return tuple(Tensor.of(SqueezedBlob(tensor.crop(slab(tensor.shape, 0, i, i + 1)))) for i in range(count))


def rows_of(tensor: Tensor, blocks: Sequence[tuple[int, int]]) -> Tensor:
    """Ranges of a tensor's first axis, one below the other."""
    shape = (sum(stop - start for start, stop in blocks), *tensor.shape[1:])
    fragments: list[Fragment] = []
    at = 0
    for start, stop in blocks:
        here = slab(shape, 0, at, at + stop - start)
        fragments.extend(tensor.placed(slab(tensor.shape, 0, start, stop), here))
        at += stop - start
    return Tensor(shape, tensor.dtype, tuple(fragments))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one below the other, along the first axis."""
    first = tensors[0]
    if any((one.shape[1:], one.dtype) != (first.shape[1:], first.dtype) for one in tensors):
        raise Unsupported(f"tensors of shapes {[list(one.shape) for one in tensors]} cannot be put into one")
    shape = (sum(one.shape[0] for one in tensors), *first.shape[1:])
    fragments: list[Fragment] = []
    at = 0
    for one in tensors:
        fragments.extend(one.placed(Box.whole(one.shape), slab(shape, 0, at, at + one.shape[0])))
        at += one.shape[0]
    return Tensor(shape, first.dtype, tuple(fragments))


def transposed(tensor: Tensor) -> Tensor:
    """A matrix with its axes exchanged."""
    if len(tensor.shape) != 2:
        raise Unsupported(f"a tensor of shape {list(tensor.shape)} cannot be transposed")
    return Tensor.of(TransposedBlob(tensor, Box.whole(tensor.shape)))


def padded(tensor: Tensor, rows: int) -> Tensor:
    """A tensor with rows of zeros below, so that it has so many."""
    if not tensor.shape or rows < tensor.shape[0]:
        raise Unsupported(f"a tensor of shape {list(tensor.shape)} cannot be padded to {rows} rows")
    rest = ZeroBlob((rows - tensor.shape[0], *tensor.shape[1:]), tensor.dtype)
    return stacked([tensor, Tensor.of(rest)]) if rest.shape[0] else tensor


@dataclass(frozen=True)
class StridedBlob:
    """Every so many-th row of a blob, from one on."""

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

    def sources(self) -> Iterator[FileBlob]:
        return self.base.sources()

    def problems(self) -> Iterator[str]:
        return self.base.problems()


def strided(tensor: Tensor, start: int, step: int) -> Tensor:
    """Every so many-th row of a tensor, from `start` on."""
    if not tensor.shape or tensor.shape[0] % step:
        raise Unsupported(f"the rows of a tensor of shape {list(tensor.shape)} do not come {step} at a time")
    return Tensor.of(StridedBlob(tensor.crop(slab(tensor.shape, 0, start, tensor.shape[0])), step))
