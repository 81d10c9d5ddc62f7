"""Tensors in a flat buffer that is split over ranks, as ZeRO and FSDP1 do. Arithmetic only."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.geometry import Shape, flat_boxes
from ckpt_formats.core.tensor import FileBlob, Fragment, Tensor, from_fragments


@dataclass(frozen=True)
class FlatPiece:
    """A rank's part of a flat buffer: a vector (n,), and the element of the buffer at which it begins."""

    begin: int
    vector: FileBlob


def tensor_in(shape: Shape, dtype: DType, begin: int, pieces: Iterable[FlatPiece]) -> Tensor:
    """The tensor of `shape` that is stored from element `begin` on in a flat buffer with these parts. Lazy."""
    return from_fragments(shape, _fragments(shape, begin, pieces), dtype)


def _fragments(shape: Shape, begin: int, pieces: Iterable[FlatPiece]) -> Iterator[Fragment]:
    end = begin + prod(shape)
    for piece in pieces:
        low, high = max(begin, piece.begin), min(end, piece.begin + piece.vector.shape[0])
        at = low - piece.begin
        for box in flat_boxes(shape, low - begin, max(low, high) - begin):
            yield Fragment(box, piece.vector.flat(at, at + box.size).shaped(box.shape))
            at += box.size
