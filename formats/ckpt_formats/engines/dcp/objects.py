"""Read values that are no tensors: each is an item of its own, a Python object in an archive of torch.save."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ckpt_formats.containers.compressed_range import DecompressedBlob, Frame
from ckpt_formats.containers.torchfile import (
    ByteSource,
    Storage,
    StorageSlice,
    TensorRef,
    Window,
    open_file,
    open_item,
    tensor_of,
)
from ckpt_formats.containers.torchfile.opcodes import PROTO
from ckpt_formats.containers.torchfile.zip_archive import END, LOCAL
from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Size, Value
from ckpt_formats.engines.dcp.items import ItemReader
from ckpt_formats.engines.dcp.metadata import ItemRange
from ckpt_formats.state_dicts.extras import map_leaves

MAX_BYTES = 256 << 20
_END_NBYTES = 22
_MAX_CACHED_BYTES = 8192


@dataclass(frozen=True)
class Object:
    """A value, and the checksums of the tensors in it."""

    value: Value
    seals: tuple[Seal, ...] = ()
    raw: bool = False
    """The value is the bytes of an item of unknown form, so that its length could not be checked."""


@dataclass(eq=False)
class ObjectReader:
    """Reads objects. Checkpoints have the same few numbers thousands of times: equal bytes are parsed once."""

    items: ItemReader
    _known: dict[bytes, Object] = field(default_factory=dict)

    def read(self, name: str, item: ItemRange) -> Object:
        """The value of an item: the object that torch.save saved, as inert data, or bytes of an unknown form.

        Raises `UnsafeError` if it would run code or exhaust memory; `CorruptError`, `NotFoundError` or
        `UnsupportedError`.
        """
        path = self.items.folder / item.file
        try:
            with self.items.window(item, MAX_BYTES) as window:
                if window.length > MAX_BYTES:
                    raise UnsafeError(f"has {window.length:,} bytes: it would exhaust memory", where=path)
                data = window.at(0, window.length) if window.length <= _MAX_CACHED_BYTES else None
                if data is not None and (known := self._known.get(data)):
                    return replace(known, value=list(known.value)) if isinstance(known.value, list) else known
                result = _read(window, item)
                if data is not None and _is_cached(result.value):
                    self._known[data] = result
            return result
        except CkptError as error:
            error.where = f"{path}, `{printable(name)}`"
            raise

    def same(self, first: ItemRange, other: ItemRange) -> bool:
        """Have both items the same bytes?"""
        with self.items.window(first, MAX_BYTES) as one, self.items.window(other, MAX_BYTES) as two:
            return one.length == two.length and all(
                one.at(at, step) == two.at(at, step)
                for at in range(0, one.length, 1 << 20)
                for step in (min(1 << 20, one.length - at),)
            )


def _read(window: ByteSource, item: ItemRange) -> Object:
    length = window.length
    head = window.at(0, min(4, length))
    if head == LOCAL or (length > _END_NBYTES and window.at(length - _END_NBYTES, 4) == END):
        file = open_item(window)
        if isinstance(window, Frame):
            window.check(file.seals())
            return Object(map_leaves(file.root, partial(_decompressed, window)))
        seals = (storage.seal for storage in file.storages)
        return Object(file.root, tuple(seal for seal in seals if seal is not None))
    if head[:1] == bytes((PROTO,)) and isinstance(window, Window):
        return Object(open_file(window.path, item.offset, item.nbytes).root)
    # Other planners than PyTorch's may save bytes of any form.
    return Object(window.at(0, length), raw=True)


def check_between(item: ItemRange, items: Collection[ItemRange], where: Path) -> None:
    """Check that an item begins at the end of another one, and ends at the beginning of another one.

    Torch writes items without gaps. For bytes of an unknown form this is the only check of their place.
    `items` are all items. Raises `CorruptError`.
    """
    path = where / item.file
    neighbours = [other for other in items if other.file == item.file]
    starts = Counter(other.offset for other in neighbours)
    ends = {0, *(other.offset + other.nbytes for other in neighbours)}
    stop = item.offset + item.nbytes
    if starts[item.offset] > 1 or item.offset not in ends or (stop not in starts and stop != path.stat().st_size):
        raise CorruptError("an item is neither an archive of torch.save nor between two other items", where=path)


def _decompressed(frame: Frame, value: Value) -> Value:
    """A value of a compressed object; a tensor gets a blob that reads from the decoded bytes."""
    if isinstance(value, (Storage, StorageSlice)):
        raise UnsupportedError("the object is compressed and contains a storage that is not a tensor", where=frame.path)
    if not isinstance(value, TensorRef):
        return value
    (fragment,) = tensor_of(value).fragments
    assert isinstance(fragment.blob, FileBlob)
    return Tensor.of(DecompressedBlob(frame, replace(fragment.blob, seal=None)))


def _is_cached(value: Value) -> bool:
    """Is it a constant, or a list of constants? Megatron saves each object as a list of one; each place gets a copy."""
    return all(map(_is_constant, value)) if type(value) is list else _is_constant(value)


def _is_constant(value: Value) -> bool:
    """Can several places of a tree share the value? Only if it is immutable."""
    if type(value) in (tuple, Size):
        return all(map(_is_constant, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes, Global)
