"""Values of a tensor that must be those of a known state: each chunk is compared with its checksum as it is read."""

from dataclasses import dataclass
from functools import cached_property

from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, FlatRangeBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.universal.chunked import is_digest, read_block

_HINT = "Name the checkpoint that was appended last; or leave out `parent` (--parent): then the chain is replayed."


class StateDiffers(CorruptError):
    """A chunk of a state has other values than the known ones."""


@dataclass(frozen=True, eq=False)
class KnownTensor:
    """A tensor, and the checksums that its values must have."""

    tensor: Tensor
    digests: bytes
    """The XXH3-128 of the values of each chunk, one after another."""
    parameter: str
    state: str
    where: str
    """The checkpoint that the tensor is in, for messages."""

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @cached_property
    def chunking(self) -> Chunking:
        return Chunking.default(self.shape)

    @cached_property
    def _elements(self) -> Blob:
        """All elements in C order, as a vector."""
        return FlatRangeBlob(self.tensor, 0, self.tensor.size)

    def values(self, index: int, reader: Reader) -> Array:
        """A chunk: (size) of the dtype; valid until the next one is cached. Raises `StateDiffers`."""
        start, stop = self.chunking.range(index)
        nbytes = (stop - start) * self.dtype.itemsize
        key = self, index
        return reader.cached_or_filled(
            key, nbytes, lambda buffer: self.fill(buffer.view(self.dtype), index, reader)
        ).view(self.dtype)

    def fill(self, out: Array, index: int, reader: Reader) -> None:
        """The same into `out`, (size) of the dtype, contiguous."""
        box = self.chunking.box(index)
        with reader.without_checksums():  # those of the chunks are enough
            self._elements.crop(box).read_into(out, reader)
        if not is_digest(out, self.digests, index):
            raise StateDiffers(
                f"`{printable(self.parameter)}`: chunk {index} of {self.chunking.count} of its state "
                f"`{printable(self.state)}` is not that of the chain's last state",
                where=self.where,
                hint=_HINT,
            )


@dataclass(frozen=True)
class KnownBlob(BlockBlob):
    """A block of a known tensor."""

    known: KnownTensor
    box: Box

    @classmethod
    def whole(cls, known: KnownTensor) -> "KnownBlob":
        return cls(known, Box.whole(known.shape))

    @property
    def dtype(self) -> DType:
        return self.known.dtype

    def read_into(self, out: Array, reader: Reader) -> None:
        known = self.known
        read_block(out, self.box, known.chunking, known.values, known.fill, reader)

    def parts(self) -> tuple[Blob, ...]:
        return (self.known.tensor.crop(self.box),)
