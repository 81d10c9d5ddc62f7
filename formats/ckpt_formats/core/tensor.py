"""Lazy tensors: where the values of each block are, and how to fetch them.

A `Blob` is anything a block of values can be read from. A `Tensor` is made of
fragments, each a box with a blob, and is itself a blob. Nothing is read until
`read_into` is called, and every byte comes through the `Reader` it is given.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ckpt_formats.core.arguments import check_fields
from ckpt_formats.core.bands import BAND, Rows
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, block_of_key, flat_boxes, missing, overlaps, slab
from ckpt_formats.core.identity import Identities
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.store_path import is_remote

if TYPE_CHECKING:
    from ckpt_formats.core.interchange import MappedFiles, TorchTensor

Array = np.ndarray[Any, DType]

_PIECE = 1 << 15
"""Bytes in a row below which reading what lies between costs less than another read: the system fetches it anyway."""
_MAX_OVERREAD = 16
"""Bytes read for each one wanted."""
_MAX_PAIRS = 1000
"""Overlaps that are worth naming: of many equal blocks, every pair overlaps."""


class Blob(ABC):
    """Anything a block of values can be read from: it has a `shape` and a `dtype`."""

    __slots__ = ()
    if TYPE_CHECKING:  # fields in some classes, properties in others

        @property
        def shape(self) -> Shape: ...
        @property
        def dtype(self) -> DType: ...

    @property
    def reads_in_place(self) -> bool:
        """Whether values come into contiguous memory without scratch memory that grows with their number."""
        return False

    @abstractmethod
    def crop(self, box: Box) -> "Blob":
        """The blob of one of its blocks. No data is read."""

    @abstractmethod
    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`: an array of this shape and dtype, the blob's own, contiguous or not."""

    def parts(self) -> "tuple[Blob, ...]":
        """The blobs that its values are computed from; none for a leaf. No data is read."""
        return ()

    def sources(self) -> "Iterator[FileBlob]":
        """The file ranges that the values come from."""
        for part in self.parts():
            yield from part.sources()

    def problems(self) -> "Iterator[str | FileProblem]":
        """What is wrong with how the values are put together, in words. No data is read."""
        for part in self.parts():
            yield from part.problems()


@dataclass(frozen=True, slots=True)
class FileProblem:
    """What is wrong with a whole file: the same for each tensor that has values in it."""

    text: str
    path: Path

    def __str__(self) -> str:
        return self.text


def cut_short(path: Path, nbytes: int, expected: int) -> FileProblem:
    """The problem of a file that has only `nbytes` of its `expected` bytes."""
    return FileProblem(f"the file is cut short: {nbytes:,} bytes, {expected:,} expected", path)


class BlockBlob(Blob):
    """A block of something larger: a subclass is a frozen dataclass with a field `box`, the block."""

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def box(self) -> Box: ...

    @property
    def shape(self) -> Shape:
        return self.box.shape

    def crop(self: "Block", box: Box) -> "Block":
        return replace(self, box=box.shift(self.box.start))  # type: ignore[type-var]


Block = TypeVar("Block", bound=BlockBlob)


@dataclass(frozen=True)
class ViewBlob(Blob):
    """Values computed from those of one blob of the same dtype."""

    base: Blob

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def parts(self) -> tuple[Blob, ...]:
        return (self.base,)


# Neither `FileBlob`, `Fragment` nor `Tensor` is frozen, although nothing changes them: a checkpoint has hundreds of
# thousands, and to make frozen ones takes four to ten times as long.
@dataclass(slots=True, unsafe_hash=True)
class FileBlob(Blob):
    """Values lying plain in a file, little-endian, at any strides (in bytes)."""

    path: Path
    offset: int
    shape: Shape
    dtype: DType
    strides: Shape
    seal: Seal | None = None

    @classmethod
    def packed(cls, path: Path, offset: int, shape: Shape, dtype: DType, seal: Seal | None = None) -> "FileBlob":
        """Values in C order without holes."""
        return cls(path, offset, shape, dtype, c_strides(shape, dtype.itemsize), seal)

    @property
    def span(self) -> int:
        """Number of bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """Do the values lie in C order without holes?"""
        return is_c_order(self.shape, self.strides, self.dtype.itemsize)

    @property
    def reads_in_place(self) -> bool:
        return True

    def crop(self, box: Box) -> "FileBlob":
        at = self.offset + sum(i * s for i, s in zip(box.start, self.strides, strict=True))
        return FileBlob(self.path, at, box.shape, self.dtype, self.strides, self.seal)

    def flat(self, start: int, stop: int) -> "FileBlob":
        """A range of a packed blob's elements, as a vector."""
        size = self.dtype.itemsize
        return FileBlob.packed(self.path, self.offset + start * size, (stop - start,), self.dtype, self.seal)

    def shaped(self, shape: Shape) -> "FileBlob":
        """A packed blob's elements under another shape of the same size."""
        return FileBlob.packed(self.path, self.offset, shape, self.dtype, self.seal)

    def read_into(self, out: Array, reader: Reader) -> None:
        if out.size == 0:
            return
        if out.flags.c_contiguous and self.is_packed:
            reader.read_into(self.path, self.offset, out.reshape(-1).view(np.uint8).data, self.seal)
            return
        axis = max(range(len(self.shape)), key=lambda i: (self.shape[i] - 1) * self.strides[i])
        if self._reads_around(axis, reader.sharers):
            self._read_rows(axis, out, reader)
            return
        half = self.shape[axis] // 2
        for low, high in ((0, half), (half, self.shape[axis])):
            box = slab(self.shape, axis, low, high)
            self.crop(box).read_into(out[box.index], reader)

    def _reads_around(self, axis: int, readers: int) -> bool:
        """Is it better to read also what lies between the values? Others of so many readers may need that."""
        if self._run(axis) > BAND:
            return False
        is_short = _in_a_row(self.shape, self.strides, self.dtype.itemsize) < _PIECE
        around = max(_MAX_OVERREAD if is_short else 2, 2 * readers)
        return self.span <= max(around * prod(self.shape) * self.dtype.itemsize, 4096)

    def _read_rows(self, axis: int, out: Array, reader: Reader) -> None:
        """Fill `out`, an array of this shape and dtype, band after band; a row is one index of `axis`."""
        stride, count, done = self.strides[axis], self.shape[axis], 0
        while done < count:
            rows = Rows(self.path, self.offset + done * stride, self._run(axis), stride, count - done, self.seal)
            window = reader.rows(rows)
            box = slab(self.shape, axis, done, done + rows.within(window.size))
            out[box.index] = np.ndarray(box.shape, self.dtype, window, 0, self.strides)
            done = box.stop[axis]

    def _run(self, axis: int) -> int:
        """Number of bytes from the first element to the end of the last of those with one index of `axis`."""
        return self.span - (self.shape[axis] - 1) * self.strides[axis]

    def sources(self) -> Iterator["FileBlob"]:
        yield self


@dataclass(frozen=True, eq=False)
class ArrayBlob(Blob):
    """Values that are in memory already: a constant, a number from a header."""

    array: Array

    @property
    def shape(self) -> Shape:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> DType:
        return self.array.dtype

    @property
    def reads_in_place(self) -> bool:
        return True

    def crop(self, box: Box) -> "ArrayBlob":
        return ArrayBlob(self.array[box.index])

    def read_into(self, out: Array, reader: Reader) -> None:
        out[...] = self.array


@dataclass(frozen=True)
class ZeroBlob(Blob):
    """Nothing but zeros: the padding of a partition, the rows of a vocabulary that only fill up."""

    shape: Shape
    dtype: DType

    @property
    def reads_in_place(self) -> bool:
        return True

    def crop(self, box: Box) -> "ZeroBlob":
        return ZeroBlob(box.shape, self.dtype)

    def read_into(self, out: Array, reader: Reader) -> None:
        out[...] = np.zeros((), self.dtype)


@dataclass(frozen=True)
class FlatRangeBlob(ViewBlob):
    """A range of another blob's elements in C order, as a vector: what a rank holds of a flattened tensor."""

    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        return (self.stop - self.start,)

    @property
    def reads_in_place(self) -> bool:
        return self.base.reads_in_place

    def crop(self, box: Box) -> "FlatRangeBlob":
        return FlatRangeBlob(self.base, self.start + box.start[0], self.start + box.stop[0])

    def read_into(self, out: Array, reader: Reader) -> None:
        at = 0
        for box in flat_boxes(self.base.shape, self.start, self.stop):
            part = out[at : at + box.size]
            block = self.base.crop(box)
            if part.flags.c_contiguous:
                block.read_into(part.reshape(box.shape), reader)
            else:
                part[...] = read(block, reader).reshape(-1)
            at += box.size

    def parts(self) -> tuple[Blob, ...]:
        return tuple(self.base.crop(box) for box in flat_boxes(self.base.shape, self.start, self.stop))


@dataclass(slots=True, unsafe_hash=True)
class Fragment:
    """One stored block of a tensor: where it belongs, and where its values are."""

    box: Box
    blob: Blob

    __repr__ = short_repr

    def crop(self, box: Box) -> "Fragment | None":
        """The part of it that lies in `box`, still counted from the tensor's corner."""
        common = self.box & box
        return None if common is None else Fragment(common, self.blob.crop(common.within(self.box)))


class ComputedFragments(Sequence[Fragment]):
    """Fragments that are computed when they are looked up. All are places in files: their blobs are `FileBlob`s."""

    __slots__ = ()

    @abstractmethod
    def around(self, box: Box) -> Iterator[Fragment]:
        """Those that have elements of a block of the tensor, and maybe others."""

    @abstractmethod
    def fill(self, shape: Shape, dtype: DType) -> bool:
        """Whether they cover a tensor of this shape exactly once, and hold its dtype. None of them is computed."""

    @abstractmethod
    def paths(self) -> Iterator[Path]:
        """The files that they are in."""

    @property
    @abstractmethod
    def source(self) -> object:
        """What tensors in the same files share."""


@dataclass(slots=True, unsafe_hash=True)
class Tensor(Blob):
    """A whole tensor, however it was cut up.

    Laws, which `problems` checks: fragments lie inside the tensor, hold its dtype,
    cover it and do not overlap. `replicas` are other whole copies of the same
    values, compared whenever values are read.
    """

    shape: Shape
    dtype: DType
    fragments: Sequence[Fragment]
    """A tuple, or `ComputedFragments`."""
    replicas: tuple["Tensor", ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Raise `InvalidArgumentError` for wrong fields, `CorruptError` for a shape that no array can have."""
        usual = type(self.shape) is tuple and isinstance(self.dtype, np.dtype) and type(self.replicas) is tuple
        if not (usual and type(self.fragments) is tuple):
            check_fields(self)
        if 0 in self.shape and prod(n or 1 for n in self.shape) * self.dtype.itemsize >= 1 << 63:
            raise CorruptError(f"a tensor of shape {list(self.shape)} of {self.dtype.name} is none that can be")

    @classmethod
    def of(cls, blob: Blob) -> "Tensor":
        """A tensor that is one blob."""
        return (
            blob if isinstance(blob, Tensor) else cls(blob.shape, blob.dtype, (Fragment(Box.whole(blob.shape), blob),))
        )

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __getitem__(self, key: Any) -> Array:
        """The values of a block, as NumPy's basic indexing selects them. Only this block is read.

        Raises `IndexError`, and `CkptError` for what cannot be read.
        """
        box, remainder = block_of_key(key, self.shape)
        return checked_read(self.crop(box))[remainder]

    @property
    def reads_in_place(self) -> bool:
        return not self.replicas and all(fragment.blob.reads_in_place for fragment in self.examples())

    @property
    def block(self) -> "BlockIndexer":
        """Blocks as lazy tensors: `tensor.block[10:20, :]`, by slices without steps. No data is read.

        `tensor[10:20, :]` reads the values.
        """
        return BlockIndexer(self)

    @property
    def flat(self) -> "FlatIndexer":
        """Ranges of the elements in C order as lazy vectors: `tensor.flat[low:high]` is (high - low,)."""
        return FlatIndexer(self)

    def mapped(self, key: Any = ...) -> Array | None:
        """The values of a block where they lie in a file, mapped into memory: a read-only array, without a copy.

        `key`: NumPy's basic indexing. The array has the shape that it selects, which is any shape, and the tensor's
        dtype. None if the values do not lie in one piece of a local file. The file must stay as it is: if it is
        changed, so are the values; if it is truncated, the system ends the process (SIGBUS).

        Raises `IndexError`, `IncompleteError` if blocks are missing, `NotFoundError` and `CorruptError` for the file.
        """
        from ckpt_formats.core.interchange import MappedFiles

        box, remainder = block_of_key(key, self.shape)
        values = mapped_array(self, MappedFiles())
        if values is None:
            return None
        block = values[box.index][(*remainder, ...)]
        block.flags.writeable = False
        return block

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """All values, read into memory: `np.asarray(tensor)`."""
        if copy is False:
            raise ValueError("the values are read from files, so they cannot be used without a copy")
        values = checked_read(self)
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """All values, read into memory, for `torch.from_dlpack(tensor)` and others.

        Raises `BufferError` for `copy=False` and for another device than `__dlpack_device__`.
        """
        from ckpt_formats.core.interchange import to_dlpack

        options = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return to_dlpack(checked_read(self), options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The processor's memory, in the terms of DLPack: (1, 0)."""
        return (1, 0)

    def torch(self, key: Any = ..., *, mmap: bool = False) -> "TorchTensor":
        """Return the values of a block as a tensor of torch, which is imported now: all values, if there is no `key`.

        Without `mmap`, only this block is read, and the tensor has the memory that it was read into. With `mmap`, the
        tensor's memory is the file, where the values lie in one piece of a local file; elsewhere they are read. Such
        a tensor is writable, too: what you write stays in this process, and never changes the file. If the file is
        changed meanwhile, so are the values; if it is truncated, the system ends the process (SIGBUS).

        Raises `IndexError`, `UnsupportedError` if torch or its dtype is missing, and `CkptError` for what cannot be
        read.
        """
        from ckpt_formats.core.interchange import MappedFiles

        return block_to_torch(self, key, MappedFiles() if mmap else None)

    def crop(self, box: Box) -> "Tensor":
        if type(self.fragments) is not tuple and box == Box.whole(self.shape):
            return self
        cropped = (fragment.crop(box) for fragment in self._around(box))
        return Tensor(
            box.shape,
            self.dtype,
            tuple(Fragment(f.box.within(box), f.blob) for f in cropped if f is not None),
            tuple(replica.crop(box) for replica in self.replicas),
        )

    def placed(self, local: Box, whole: Box) -> Iterator[Fragment]:
        """The fragments of block `local`, moved to where block `whole` of another tensor is."""
        for fragment in self._around(local):
            if part := fragment.crop(local):
                yield Fragment(part.box.within(local).shift(whole.start), part.blob)

    def examples(self) -> Sequence[Fragment]:
        """Fragments whose blobs are of all kinds that there are: one, if all are alike."""
        return self.fragments if type(self.fragments) is tuple else self.fragments[:1]

    def _around(self, box: Box) -> Iterable[Fragment]:
        """The fragments that have elements of a block, and maybe others."""
        return self.fragments.around(box) if isinstance(self.fragments, ComputedFragments) else self.fragments

    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`: an array of this shape and dtype. Blocks without a fragment stay as they are: check `problems`.

        Raises `CorruptError` if a replica holds other bits.
        """
        for fragment in self.fragments:
            fragment.blob.read_into(out[fragment.box.index], reader)
        for replica in self.replicas:
            if read(replica, reader).tobytes() != out.tobytes():
                raise replicas_differ(self, replica)

    def parts(self) -> tuple[Blob, ...]:
        return (*(fragment.blob for fragment in self.fragments), *self.replicas)

    def problems(self) -> Iterator[str | FileProblem]:
        """What is wrong with the fragments, in words. No data is read."""
        if not isinstance(self.fragments, ComputedFragments) or not self.fragments.fill(self.shape, self.dtype):
            yield from self._problems_of_fragments()
        for replica in self.replicas:
            if (replica.shape, replica.dtype) != (self.shape, self.dtype):
                yield f"a replica has shape {list(replica.shape)} and type {replica.dtype.name}"
            yield from replica.problems()

    def _problems_of_fragments(self) -> Iterator[str | FileProblem]:
        whole, outside = Box.whole(self.shape), False
        if len(self.fragments) == 1:
            box, blob = self.fragments[0].box, self.fragments[0].blob
            if box == whole and (blob.shape, blob.dtype) == (self.shape, self.dtype):
                yield from blob.problems()
                return
        for fragment in self.fragments:
            if fragment.box.size and fragment.box & whole != fragment.box:
                outside = True
                yield f"a stored block {fragment.box} lies outside the shape {list(self.shape)}"
            if fragment.blob.dtype != self.dtype:
                yield f"block {fragment.box} holds {fragment.blob.dtype.name}, the tensor {self.dtype.name}"
            if fragment.blob.shape != fragment.box.shape:
                yield f"block {fragment.box} is stored with the shape {list(fragment.blob.shape)}"
            yield from fragment.blob.problems()
        boxes = [fragment.box for fragment in self.fragments]
        pairs = list(islice(overlaps(boxes), _MAX_PAIRS))
        # Blocks inside that do not overlap leave no gap if they are as large as the whole.
        if outside or pairs or sum(box.size for box in boxes) != whole.size:
            for gap in missing(whole, boxes):
                yield f"no file holds block {gap} of shape {list(self.shape)}"
        for i, j in pairs:
            yield f"blocks {boxes[i]} and {boxes[j]} overlap"


class BlockIndexer:
    """Indexes a tensor by blocks. See `Tensor.block`."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, key: Any) -> Tensor:
        """The lazy tensor of a block, with as many axes as the tensor has.

        Raises `IndexError` for anything but slices without steps and `...`.
        """
        box, remainder = block_of_key(key, self._tensor.shape)
        if any(one != slice(None) for one in remainder):
            raise IndexError("a block needs a slice without a step for each axis, such as 3:4 instead of 3")
        return self._tensor.crop(box)


class FlatIndexer:
    """Indexes a tensor by ranges of its elements. See `Tensor.flat`."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, key: slice) -> Tensor:
        """The lazy vector of a range of elements, counted in C order. Raises `IndexError` for any other key."""
        tensor = self._tensor
        box, remainder = block_of_key(key, (tensor.size,))
        if remainder != (slice(None),):
            raise IndexError("a flat range is a slice without a step, such as 3:4")
        if len(tensor.shape) == 1:
            return tensor.crop(box)
        return Tensor.of(FlatRangeBlob(tensor, box.start[0], box.stop[0]))


def read(blob: Blob, reader: Reader | None = None) -> Array:
    """All values of a blob, in memory: an array of any shape and dtype, those of the blob."""
    out = np.empty(blob.shape, blob.dtype)
    if reader is not None:
        blob.read_into(out, reader)
    else:
        with Reader(check=False) as own:
            blob.read_into(out, own)
    return out


def checked_read(tensor: Tensor, identities: Identities | None = None) -> Array:
    """All values of a tensor, in memory, of any shape and dtype; of files that have these identities, if any.

    Raises `IncompleteError` if blocks of it are missing, `CorruptError` if replicas differ, `UnsupportedError` if
    values overflow in a cast that does not allow it. Checksums that cover more than the tensor's own bytes are not
    verified; `ckpt verify` does that.
    """
    from ckpt_formats.core.value_changes import check_allowed, totals  # an index is made without values

    for problem in tensor.problems():
        raise IncompleteError(str(problem))
    with Reader(check=False, identities=identities) as reader:
        values = read(tensor, reader)
        check_allowed(totals(reader.changes.seen()))
    return values


def block_to_torch(
    tensor: Tensor, key: Any, files: "MappedFiles | None" = None, identities: Identities | None = None
) -> "TorchTensor":
    """Return a block of a tensor, as NumPy's basic indexing selects it, as a tensor of torch.

    Its memory is where the values lie in `files`, if they lie there in one piece; else it is new, and only this block
    is read. Raises as `Tensor.torch`, and `CorruptError` for a file that is not the one of `identities`.
    """
    from ckpt_formats.core.interchange import to_torch

    box, remainder = block_of_key(key, tensor.shape)
    mapped = None if files is None else mapped_array(tensor, files)
    values = checked_read(tensor.crop(box), identities) if mapped is None else mapped[box.index]
    return to_torch(values[(*remainder, ...)])


def mapped_array(tensor: Tensor, files: "MappedFiles") -> Array | None:
    """All values of a tensor, of any shape and dtype, where they lie in a file that `files` maps.

    None if they lie in no single aligned piece.

    Raises `IncompleteError` if blocks are missing, and as `MappedFiles.array`.
    """
    for problem in tensor.problems():
        raise IncompleteError(str(problem))
    if tensor.replicas or not tensor.size or len(tensor.fragments) != 1:
        return None
    blob = tensor.fragments[0].blob
    if not isinstance(blob, FileBlob) or is_remote(blob.path) or not blob.is_packed:
        return None
    return None if blob.offset % blob.dtype.alignment else files.array(blob)


def replicas_differ(tensor: Tensor, replica: Tensor) -> CorruptError:
    """Two copies that should be equal are not: name the files of both."""
    first, second = ({str(raw.path) for f in t.fragments for raw in f.blob.sources()} for t in (tensor, replica))
    return CorruptError(
        f"replicas of one tensor differ: {', '.join(sorted(first))} against {', '.join(sorted(second))}",
        hint='If they are meant to differ, say with --rules which counts: how = "first" or "averaged".',
    )


def from_fragments(shape: Shape, parts: Iterable[Fragment], dtype: DType) -> Tensor:
    """A tensor of fragments that come from several places; empty ones are left out."""
    return Tensor(shape, dtype, tuple(part for part in parts if part.box.size))


def with_replicas(tensors: Sequence[Tensor]) -> Tensor:
    """The first of several whole copies, remembering the others."""
    return replace(tensors[0], replicas=(*tensors[0].replicas, *tensors[1:]))


def c_strides(shape: Shape, itemsize: int) -> Shape:
    """Strides, in bytes, of packed C order."""
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def is_c_order(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Do these strides, in bytes, lay out C order without holes?"""
    step = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


def _in_a_row(shape: Shape, strides: Shape, itemsize: int) -> int:
    """Bytes of the longest runs of values that lie without holes."""
    step = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            break
        step *= length
    return step
