"""A block of a tensor, cut out when it is read: there are as many as a checkpoint has blocks, each of all fragments."""

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, FileBlob, Tensor


@dataclass(frozen=True, slots=True)
class BlockBlob:
    """The blob of one block of a tensor."""

    whole: Tensor
    box: Box

    @property
    def shape(self) -> Shape:
        return self.box.shape

    @property
    def dtype(self) -> DType:
        return self.whole.dtype

    def crop(self, box: Box) -> "BlockBlob":
        return BlockBlob(self.whole, box.shift(self.box.start))

    def read_into(self, out: Array, reader: Reader) -> None:
        self.whole.crop(self.box).read_into(out, reader)

    def sources(self) -> Iterator[FileBlob]:
        return self.whole.crop(self.box).sources()

    def problems(self) -> Iterator[str]:
        return self.whole.problems()
