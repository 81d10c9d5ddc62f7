"""Tensors of a PyTorch file: views of numbered storages.

A `Storage` is a contiguous range of bytes in the file; a `TensorRef` states which
of its elements form a tensor. Two tensors are tied, or views of one buffer,
exactly if their storages have the same `key` in the same file.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Protocol

from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsafeError
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import FileBlob, Fragment, Tensor, c_strides
from ckpt_formats.core.values import Global, Value

# An expanded tensor has one stored element in several places. Small ones occur,
# for example as masks; a copy of a large one could have terabytes.
MAX_EXPANDED_BYTES = 16 << 20

STORAGE_CLASSES: dict[str, tuple[str | None, int]] = {
    "BoolStorage": ("bool", 1),
    "ByteStorage": ("uint8", 1),
    "CharStorage": ("int8", 1),
    "ShortStorage": ("int16", 2),
    "IntStorage": ("int32", 4),
    "LongStorage": ("int64", 8),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "FloatStorage": ("float32", 4),
    "DoubleStorage": ("float64", 8),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
    "QInt8Storage": (None, 1),
    "QUInt8Storage": (None, 1),
    "QInt32Storage": (None, 4),
    "QUInt4x2Storage": (None, 1),
    "QUInt2x4Storage": (None, 1),
    "UntypedStorage": (None, 1),
    "_UntypedStorage": (None, 1),
}
"""Name of a storage class -> its element type (None if NumPy lacks it), and bytes per element."""

STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage")


class StorageOffsets(Protocol):
    """Where the storages of a file are."""

    @property
    def path(self) -> Path:
        """The file."""

    def find(self, key: str) -> tuple[int, Seal | None]:
        """Byte offset of a storage in the file, and its checksum if the file has one."""


# Storages and tensor references are not frozen, although nothing changes them: there is one for every
# tensor of a file, and frozen dataclasses would take a fifth of the time to open a file.
@dataclass(slots=True, eq=False)
class Storage:
    """A contiguous range of elements in a file. Its offset is looked up when it is first used."""

    key: str
    cls: Global
    dtype: DType | None
    """None if the storage has no type of its own, or one that NumPy lacks."""
    itemsize: int
    numel: int
    location: str
    """The device it was saved from, such as `cpu` or `cuda:0`."""
    offsets: StorageOffsets = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.itemsize

    @property
    def path(self) -> Path:
        """The file."""
        return self.offsets.path

    @property
    def offset(self) -> int:
        """Byte offset in the file."""
        return self.offsets.find(self.key)[0]

    @property
    def seal(self) -> Seal | None:
        """The checksum of its bytes, if the file has one."""
        return self.offsets.find(self.key)[1]


@dataclass(frozen=True, slots=True, eq=False)
class StorageSlice:
    """A part of a storage, in the place of a storage. Only files of PyTorch before 0.4 contain it."""

    storage: Storage
    start: int
    """In elements."""
    numel: int


@dataclass(slots=True, eq=False)
class TensorRef:
    """A tensor in a file: elements of a storage. Invariant: all elements are inside the storage."""

    storage: Storage
    dtype: DType
    offset: int
    """In elements of `dtype`, as are the strides."""
    shape: Shape
    strides: Shape
    requires_grad: bool = False
    is_parameter: bool = False
    attrs: Value = None
    """Python attributes of the tensor object, as a dict, if it had any."""
    _blob: FileBlob | None = field(default=None, repr=False)
    """That of `blob_of`, once it is known."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def tensor_ref(
    storage: Storage | StorageSlice,
    dtype: DType,
    offset: int,
    shape: Shape,
    strides: Shape,
    requires_grad: bool,
    where: str,
) -> TensorRef:
    """A reference to a tensor, after a check of its geometry against its storage.

    Raises `CorruptError` if it reaches outside the storage, `UnsafeError` if it is expanded to more than 16 MiB.
    """
    base = storage.storage if type(storage) is StorageSlice else storage
    assert isinstance(base, Storage)
    size, is_packed, reach = 1, True, 0
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != size:
            is_packed = False
        reach += (length - 1) * stride
        size *= length
    stored = storage.numel * base.itemsize // dtype.itemsize
    if size and offset + (size - 1 if is_packed else reach) >= stored:
        raise CorruptError(
            f"a tensor of shape {list(shape)} reaches to element {offset + reach} of storage {base.key!r:.40}, "
            f"which has {stored}",
            where=where,
        )
    if size > stored and size * dtype.itemsize > MAX_EXPANDED_BYTES:
        raise UnsafeError(
            f"a tensor of shape {list(shape)} is expanded from {stored} stored elements to {size}: "
            "it would exhaust memory or disk",
            where=where,
        )
    if storage is not base:
        assert isinstance(storage, StorageSlice)
        offset += storage.start * base.itemsize // dtype.itemsize
    return TensorRef(base, dtype, offset, shape, strides, requires_grad)


def tensor_of(ref: TensorRef) -> Tensor:
    """The lazy tensor of a reference. Looks up the offset of its storage, as `blob_of`."""
    box = _whole(ref.shape, ref.strides, ref.dtype.itemsize)[1]
    return Tensor(ref.shape, ref.dtype, (Fragment(box, blob_of(ref)),))


def blob_of(ref: TensorRef) -> FileBlob:
    """The place in the file of the values of a reference.

    Looks up the offset of its storage: one small read the first time.
    """
    if ref._blob is None:
        storage, dtype = ref.storage, ref.dtype
        at, seal = storage.offsets.find(storage.key)
        strides = _whole(ref.shape, ref.strides, dtype.itemsize)[0]
        offset = at + ref.offset * dtype.itemsize
        ref._blob = FileBlob(storage.offsets.path, offset, ref.shape, dtype, strides, seal)
    return ref._blob


@lru_cache(1 << 12)  # a checkpoint has many tensors of few shapes
def _whole(shape: Shape, strides: Shape, itemsize: int) -> tuple[Shape, Box]:
    """The strides in bytes of a tensor whose strides in elements are given, and the box that is all of it."""
    packed, box = c_strides(shape, itemsize), Box.whole(shape)
    if 0 in shape:
        return packed, box
    # The stride of an axis of length 1 is never used, and may be any number.
    return tuple(p if n == 1 else s * itemsize for n, s, p in zip(shape, strides, packed, strict=True)), box


def storage_class(cls: Global) -> tuple[DType | None, int] | None:
    """Element type and bytes per element of a storage class; None if the name is not one."""
    if cls.module not in STORAGE_MODULES or cls.name not in STORAGE_CLASSES:
        return None
    dtype, itemsize = STORAGE_CLASSES[cls.name]
    return (None if dtype is None else DTYPES[dtype]), itemsize
