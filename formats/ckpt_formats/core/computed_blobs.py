"""Blobs whose values are computed when they are read: from those of other blobs, block by block.

Where values are stored is the subject of `tensor`.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ckpt_codecs.base import Codec
from ckpt_codecs.scratch import temporary_buffer
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, Blob, ViewBlob, read


@dataclass(frozen=True)
class DerivedBlob(Blob):
    """Values that a codec makes of another blob, element by element."""

    codec: Codec
    base: Blob
    dtype: DType

    @property
    def shape(self) -> Shape:
        return self.base.shape

    def crop(self, box: Box) -> "DerivedBlob":
        return DerivedBlob(self.codec, self.base.crop(box), self.dtype)

    def read_into(self, out: Array, reader: Reader) -> None:
        with temporary_buffer(prod(self.shape) * self.base.dtype.itemsize) as buffer:
            base = buffer.view(self.base.dtype).reshape(self.shape)
            self.base.read_into(base, reader)
            self.codec.decode_into(b"", out, base)
            self._note_changes(base, out, reader)

    def _note_changes(self, before: Array, after: Array, reader: Reader) -> None:
        """Note what the codec changed, for the user. before, after: the values of the whole block, of its shape."""

    def parts(self) -> tuple[Blob, ...]:
        return (self.base,)


@dataclass(frozen=True)
class CastBlob(DerivedBlob):
    """Values in another type, as the user requested. What changes other than by rounding is counted."""

    name: str
    """The parameter."""
    refused: bool = False
    """Whether the user has to allow values that overflow."""
    start: Shape | None = None
    """Where the block begins in the parameter; None: it is all of it."""

    def crop(self, box: Box) -> "CastBlob":
        return replace(self, base=self.base.crop(box), start=_in_parameter(box, self.start).start)

    def _note_changes(self, before: Array, after: Array, reader: Reader) -> None:
        self.count(Box.whole(self.shape), before, after, reader)

    def count(self, box: Box, before: Array, after: Array, reader: Reader) -> None:
        """Count what the cast of a block of it changed.

        before, after: its values, of one shape, which may be any, and of any float dtypes.
        """
        from ckpt_formats.core.value_changes import changed_by_cast  # an index is made without values

        place = _in_parameter(box, self.start)
        reader.changes.note(changed_by_cast(self.name, place, before, after, self.refused))


@dataclass(frozen=True)
class ComputedBlob(ViewBlob):
    """The result of a computation with several tensors. Its values that are NaN or infinite are counted."""

    name: str
    """The parameter."""
    start: Shape | None = None
    """Where the block begins in the parameter; None: it is all of it."""

    @property
    def shape(self) -> Shape:
        return self.base.shape

    def crop(self, box: Box) -> "ComputedBlob":
        return ComputedBlob(self.base.crop(box), self.name, _in_parameter(box, self.start).start)

    def read_into(self, out: Array, reader: Reader) -> None:
        from ckpt_formats.core.value_changes import ValueChange, count_kinds  # an index is made without values

        self.base.read_into(out, reader)
        place = _in_parameter(Box.whole(self.shape), self.start)
        count = count_kinds(out).not_finite
        reader.changes.note(ValueChange(self.name, self.dtype.name, place, not_finite=count))


def _in_parameter(box: Box, start: Shape | None) -> Box:
    """A block in a parameter, given in a block of it that begins at `start`; None: at the beginning."""
    return box if start is None else box.shift(start)


@dataclass(frozen=True)
class CombinedBlob(Blob):
    """Values that are computed from several blobs of one shape, element by element."""

    blobs: tuple[Blob, ...]

    @property
    def shape(self) -> Shape:
        return self.blobs[0].shape

    def crop(self, box: Box) -> "CombinedBlob":
        return replace(self, blobs=tuple(blob.crop(box) for blob in self.blobs))

    def parts(self) -> tuple[Blob, ...]:
        return self.blobs


@dataclass(frozen=True)
class MeanBlob(CombinedBlob):
    """The mean of equally shaped blobs, summed in the order given and in their own precision."""

    @property
    def dtype(self) -> DType:
        return self.blobs[0].dtype

    def read_into(self, out: Array, reader: Reader) -> None:
        total = read(self.blobs[0], reader)
        for blob in self.blobs[1:]:
            total = total + read(blob, reader)
        out[...] = total / np.asarray(len(self.blobs), total.dtype)
