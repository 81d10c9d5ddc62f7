"""How a tensor is divided into chunks that are encoded one by one."""

import builtins
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_formats.core.distinct import distinct
from ckpt_formats.core.geometry import Box, Shape, flat_ends

if TYPE_CHECKING:
    import numpy.typing as npt

DEFAULT_ELEMENTS = 1 << 18
"""Of a chunk: enough for a codec to learn from, and few enough to be held in a core's cache."""
_MAX_WIDTH = 1 << 14
"""Elements of a row that is never divided."""


@dataclass(frozen=True)
class Chunking:
    """A tensor of `shape` in chunks, in C order. All chunks but the last are equally large."""

    shape: Shape
    chunk: Shape
    """`(rows, columns)` or `(elements,)` of every chunk but the last, which may have fewer rows or elements."""

    @classmethod
    def default(cls, shape: Shape) -> "Chunking":
        """Full rows of the last axes where these are not too long, else runs of elements.

        >>> [Chunking.default(s).chunk for s in ((4096, 256), (8, 14336, 4096), (64, 3, 3, 3), (1000,))]
        [(1024, 256), (64, 4096), (9709, 27), (262144,)]
        """
        return cls(shape, _default_chunk(shape, DEFAULT_ELEMENTS, _MAX_WIDTH))

    @cached_property
    def size(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @cached_property
    def chunk_size(self) -> int:
        """Elements of every chunk but the last."""
        return prod(self.chunk)

    @cached_property
    def count(self) -> int:
        """How many chunks there are."""
        return -(-self.size // self.chunk_size)

    def range(self, index: int) -> tuple[int, int]:
        """The elements of a chunk: the first, and the one after the last, counted in C order."""
        return index * self.chunk_size, min((index + 1) * self.chunk_size, self.size)

    def box(self, index: int) -> Box:
        """The same as a box of the tensor's elements as a vector."""
        start, stop = self.range(index)
        return Box((start,), (stop,))

    def chunk_shape(self, size: int) -> Shape:
        """The shape in which a codec gets a chunk of `size` elements."""
        return (size,) if len(self.chunk) == 1 else (size // self.chunk[1], self.chunk[1])

    def touched(self, box: Box) -> builtins.range:
        """The numbers of the chunks among which all are that hold an element of a block of the tensor."""
        first, last = flat_ends(box, self.shape)
        return range(first // self.chunk_size, (last - 1) // self.chunk_size + 1) if box.size else range(0)


@lru_cache(maxsize=1024)
def _default_chunk(shape: Shape, elements: int, max_width: int) -> Shape:
    """The chunk of `Chunking.default`."""
    widths = [prod(shape[axis:]) for axis in range(1, len(shape))]
    fitting = [width for width in widths if 1 < width <= max_width]
    last = widths[-1] if widths and 1 < widths[-1] <= elements else None
    width = fitting[0] if fitting else last
    return (elements,) if width is None else (elements // width, width)


def chunk_sizes(
    ranks: "npt.NDArray[Any]", dims: "npt.NDArray[Any]"
) -> "tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]":
    """How tensors are divided by `Chunking.default`: the elements of a full chunk, and how many chunks there are.

    Both are (tensors,) int64. ranks: (tensors,), the numbers of their dimensions, whose sum is the length of `dims`,
    the sizes of all dimensions. Sizes of tensors must be below 2**62.
    """
    elements, counts = np.full(len(ranks), DEFAULT_ELEMENTS, np.int64), np.zeros(len(ranks), np.int64)
    begins = np.cumsum(ranks, dtype=np.int64) - ranks
    for rank in distinct(ranks).tolist():
        rows = np.flatnonzero(ranks == rank)
        shapes = dims[begins[rows, None] + np.arange(rank)].astype(np.int64)
        widths = np.cumprod(shapes[:, ::-1], axis=1)[:, ::-1] if rank else np.ones((len(rows), 1), np.int64)
        inner, size = widths[:, 1:], widths[:, 0]
        fits = (inner > 1) & (inner <= _MAX_WIDTH)
        chunk = elements[rows]
        if inner.shape[1]:
            last = inner[:, -1]
            chunk = np.where(
                (last > 1) & (last <= DEFAULT_ELEMENTS), DEFAULT_ELEMENTS // np.maximum(last, 1) * last, chunk
            )
            width = inner[np.arange(len(rows)), fits.argmax(axis=1)]
            chunk = np.where(fits.any(axis=1), DEFAULT_ELEMENTS // np.maximum(width, 1) * width, chunk)
        elements[rows], counts[rows] = chunk, -(-size // chunk)
    return elements, counts
