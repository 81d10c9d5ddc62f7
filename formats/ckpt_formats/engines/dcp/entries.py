"""Items to write: the size and the bytes of each.

An item is an archive of torch.save. Archives of tensors of one type and shape differ only in
the values and their checksums, so that the layout is computed once for all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckpt_formats.containers.torchfile import FileLayout, layout_file
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, Tensor, ZeroBlob
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.metadata import Steps

_STEM = "archive"


@dataclass(frozen=True, slots=True)
class Entry:
    """One item to write: an object, or a block of a tensor."""

    name: str
    path: Steps
    number: int
    """The number of the value in the state dict."""
    value: Value
    box: Box | None = None
    """The block of the tensor; None for objects."""
    chunk: int = 0
    """The number of the block among those of the tensor."""


@dataclass(frozen=True)
class ItemsContent:
    """What a file of items holds, in its order."""

    entries: tuple[Entry, ...]


@dataclass
class EntryLayouts:
    """The layouts of items, cached by type and shape of tensors."""

    _by_type: dict[tuple[DType, Shape], FileLayout] = field(default_factory=dict)

    def of(self, entry: Entry) -> FileLayout:
        """The layout of an item. Raises `UnsupportedError` for values that PyTorch cannot represent."""
        try:
            if entry.box is None:
                return layout_file(entry.value, _STEM)
            return self.of_block(entry.value.dtype, entry.box.shape)
        except UnsupportedError as error:
            error.where = error.where or f"`{printable(entry.name)}`"
            raise

    def of_block(self, dtype: DType, shape: Shape) -> FileLayout:
        """The layout of a block of a tensor. Raises `UnsupportedError` for types that PyTorch does not have."""
        kind = dtype, shape
        if kind not in self._by_type:
            self._by_type[kind] = layout_file(Tensor.of(ZeroBlob(shape, dtype)), _STEM)
        return self._by_type[kind]

    def stream(self, entry: Entry, transfer: Transfer) -> Iterator[bytes | memoryview]:
        """All bytes of an item, in order."""
        return self.of(entry).stream(_chunks(entry, transfer))


def block_of(entry: Entry) -> Tensor:
    """The tensor of an item, which must be a block of a tensor. No values are read."""
    assert entry.box is not None
    if entry.box.shape == entry.value.shape:
        return entry.value  # type: ignore[no-any-return]  # a tensor, since there is a box
    return Tensor.of(_CroppedBlob(entry.value, entry.box))


@dataclass(frozen=True, slots=True)
class _CroppedBlob(BlockBlob):
    """A block of a tensor that is cropped only when it is read. A checkpoint has many of them, so they are small."""

    tensor: Tensor
    box: Box

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    def read_into(self, out: Array, reader: Reader) -> None:
        self.tensor.crop(self.box).read_into(out, reader)

    def parts(self) -> tuple[Blob, ...]:
        return (self.tensor.crop(self.box),)


def _chunks(entry: Entry, transfer: Transfer) -> Callable[[Tensor], Iterator[memoryview]]:
    if entry.box is None:
        return transfer.chunks
    return lambda template: transfer.chunks(block_of(entry))
