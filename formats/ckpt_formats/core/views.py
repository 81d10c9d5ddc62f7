"""Tensors seen another way, without reading them: with an axis more or less, or as a range of a flat buffer."""

from collections.abc import Iterator, Mapping, Sequence
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
    FileBlob,
    Fragment,
    Tensor,
    c_strides,
    from_fragments,
    is_c_order,
    read,
)


@dataclass(frozen=True)
class _ViewBlob(Blob):
    """A blob of the same values as another."""

    base: Blob

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def parts(self) -> tuple[Blob, ...]:
        return (self.base,)


@dataclass(frozen=True)
class StackedBlob(_ViewBlob):
    """A blob with a first axis of length 1."""

    @property
    def shape(self) -> Shape:
        return (1, *self.base.shape)

    def crop(self, box: Box) -> "StackedBlob":
        return StackedBlob(self.base.crop(Box(box.start[1:], box.stop[1:])))

    def read_into(self, out: Array, reader: Reader) -> None:
        self.base.read_into(out[0, ...], reader)


@dataclass(frozen=True)
class UnstackedBlob(_ViewBlob):
    """A blob without its first axis, which has length 1."""

    @property
    def shape(self) -> Shape:
        return self.base.shape[1:]

    def crop(self, box: Box) -> "UnstackedBlob":
        return UnstackedBlob(self.base.crop(Box((0, *box.start), (1, *box.stop))))

    def read_into(self, out: Array, reader: Reader) -> None:
        self.base.read_into(out[None], reader)


@dataclass(frozen=True)
class PermutedBlob(_ViewBlob):
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
class ReshapedBlob(_ViewBlob):
    """A block of the tensor whose elements, in C order, are a vector's."""

    whole: Shape
    box: Box

    @property
    def shape(self) -> Shape:
        return self.box.shape

    def crop(self, box: Box) -> "ReshapedBlob":
        return ReshapedBlob(self.base, self.whole, box.shift(self.box.start))

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


def reshaped(vector: Tensor, start: int, shape: Shape) -> Tensor:
    """The tensor whose elements, in C order, are a vector's from `start` on."""
    cut = vector.crop(Box((start,), (start + prod(shape),)))
    return from_fragments(shape, _reshaped(cut, shape), vector.dtype)


def permuted(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """The tensor with axis `axes[i]` of it as axis `i`."""
    return Tensor.of(PermutedBlob(tensor, tuple(axes)))


def transposed(tensor: Tensor) -> Tensor:
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
