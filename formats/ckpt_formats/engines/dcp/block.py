"""A block of a tensor that is cropped only when it is read. A checkpoint has many of them, so they are small."""

from dataclasses import dataclass

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, Blob, Tensor


@dataclass(frozen=True, slots=True)
class BlockBlob(Blob):
    """The values of block `box` of a tensor."""

    tensor: Tensor
    box: Box

    @property
    def shape(self) -> Shape:
        return self.box.shape

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    def crop(self, box: Box) -> "BlockBlob":
        return BlockBlob(self.tensor, box.shift(self.box.start))

    def read_into(self, out: Array, reader: Reader) -> None:
        """Read the block into `out`, an array of `shape` and `dtype`."""
        self.tensor.crop(self.box).read_into(out, reader)

    def parts(self) -> tuple[Blob, ...]:
        return (self.tensor.crop(self.box),)
