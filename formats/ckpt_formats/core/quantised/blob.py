"""The values of a quantised weight, computed block by block from codes, scales and tables."""

from dataclasses import dataclass
from math import prod

from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised.base import Block, Quantisation
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, slabs
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, Tensor, read

_ELEMENTS = 1 << 18
"""Values that are computed at once, with all values of their rows: what lies between them may have to be read."""


@dataclass(frozen=True)
class QuantisedBlob(BlockBlob):
    """A block of a quantised weight. Only the codes and scales of the block are read."""

    quantisation: Quantisation
    stored: tuple[Tensor, ...]
    """Whole parts, in the order of the quantisation."""
    box: Box

    @property
    def dtype(self) -> DType:
        return self.quantisation.dtype

    def parts(self) -> tuple[Blob, ...]:
        if not self.box.size:
            return ()
        return tuple(tensor.crop(box) for tensor, box in zip(self.stored, self._boxes(self.box), strict=True))

    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`: (shape) of `dtype`. Raises `CorruptError` if codes or scales have values that cannot be."""
        rest = prod(self.shape[1:])
        widened = prod(self.quantisation.shape[1:])
        size = max(1, _ELEMENTS * rest // max(widened, 1))
        for slab in slabs(self.shape, size):
            box = slab.shift(self.box.start)
            pairs = zip(self.stored, self._boxes(box), strict=True)
            parts = [read(tensor.crop(part), reader) for tensor, part in pairs]
            try:
                self.quantisation.decode(_block(box), parts, out[slab.index])
            except CodecError as error:
                raise CorruptError(f"a quantised weight ({self.quantisation.name}): {error}") from error

    def _boxes(self, box: Box) -> tuple[Box, ...]:
        """The block of each part that a block of the weight needs."""
        blocks = self.quantisation.part_blocks(_block(box))
        return tuple(Box(tuple(low for low, _ in block), tuple(high for _, high in block)) for block in blocks)


def _block(box: Box) -> Block:
    return tuple(zip(box.start, box.stop, strict=True))


def quantised_tensor(quantisation: Quantisation, parts: tuple[Blob, ...]) -> Tensor:
    """The values of a quantised weight as a lazy tensor of the plain weight's shape.

    parts: whole, in the order of the quantisation. Raises `CorruptError` if their shapes or types do not fit.
    """
    try:
        quantisation.check([(part.shape, part.dtype) for part in parts])
    except CodecError as error:
        raise CorruptError(f"a quantised weight ({quantisation.name}): {error}") from error
    stored = tuple(Tensor.of(part) for part in parts)
    return Tensor.of(QuantisedBlob(quantisation, stored, Box.whole(quantisation.shape)))
