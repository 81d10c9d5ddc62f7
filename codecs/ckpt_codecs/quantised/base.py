"""The interface of quantised weights: which blocks of the stored parts give a block of the values, and how."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import ml_dtypes
import numpy as np

from ckpt_codecs.base import Array, DType, Shape
from ckpt_codecs.errors import CodecError

Range = tuple[int, int]
"""The first index along an axis, and the one after the last."""
Block = tuple[Range, ...]
"""A block of an array: a range along each axis."""

FLOAT32: DType = np.dtype(np.float32)
FLOAT16: DType = np.dtype(np.float16)
BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)
_MAX_AXES = 8


@dataclass(frozen=True)
class Part:
    """One stored array of a quantised weight."""

    role: str
    """`codes`, `scales`, `zeros`, `table` or `order`."""
    shape: Shape
    dtypes: tuple[str, ...]
    """The names of the dtypes that it may have."""


@dataclass(frozen=True)
class Quantisation(ABC):
    """How the stored parts of one weight give its values.

    The fields are its whole configuration. All methods are pure: several threads may use one object.
    """

    shape: Shape
    """Of the plain weight."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def code_bits(self) -> float:
        """Bits of a code."""

    @property
    @abstractmethod
    def dtype(self) -> DType:
        """The dtype in which the values come out: that of the last operation of the scheme's own library."""

    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The stored parts, in the order in which `decode` takes them."""

    @abstractmethod
    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        """The block of each part that is needed for a block of the values."""

    @abstractmethod
    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        """Compute a block of the values.

        block: where it is in the weight. parts: the blocks of `part_blocks`, any shapes, of their parts' dtypes.
        out: an array of the block's shape and of `dtype`, filled in place.

        Raises `CodecError` if the parts have values that no library writes.
        """

    def check(self, parts: Sequence[tuple[Shape, DType]]) -> None:
        """Raise `CodecError` if stored arrays of these shapes and dtypes are not those of the weight."""
        wanted = self.parts()
        if len(parts) != len(wanted):
            raise CodecError(f"{self.name} needs {len(wanted)} parts, not {len(parts)}")
        for part, (shape, dtype) in zip(wanted, parts, strict=True):
            if dtype.name not in part.dtypes:
                raise CodecError(f"its {part.role} have the type {dtype.name}, not {' or '.join(part.dtypes)}")
            if shape != part.shape:
                raise CodecError(f"its {part.role} have the shape {list(shape)}, not {list(part.shape)}")

    def decode_whole(self, parts: Sequence[Array]) -> Array:
        """Return all values: an array of the weight's shape, any shape, and of `dtype`.

        parts: whole, of the shapes and dtypes that `parts` states. Raises `CodecError` if they are others.
        """
        self.check([(part.shape, part.dtype) for part in parts])
        out, whole = np.empty(self.shape, self.dtype), whole_block(self.shape)
        if out.size:
            blocks = zip(parts, self.part_blocks(whole), strict=True)
            self.decode(whole, [part[slices(block)] for part, block in blocks], out)
        return out


def whole_block(shape: Shape) -> Block:
    """The block that is all of an array."""
    return tuple((0, length) for length in shape)


def slices(block: Block) -> tuple[slice, ...]:
    """The index of a block in an array."""
    return tuple(slice(low, high) for low, high in block)


def block_shape(block: Block) -> Shape:
    """The shape of a block."""
    return tuple(high - low for low, high in block)


def flat_range(block: Block, shape: Sequence[int]) -> tuple[int, int]:
    """Return the range of a flat tensor of this shape from the first element of a block to its last, in C order."""
    low = high = 0
    for (start, stop), n in zip(block, shape, strict=True):
        low, high = low * n + start, high * n + stop - 1
    return (low, high + 1) if all(start < stop for start, stop in block) else (0, 0)


def outer(span: Range, unit: int) -> Range:
    """The range of units, each of `unit` elements, in which a range of elements lies."""
    low, high = span
    return (low // unit, -(-high // unit)) if low < high else (low // unit, low // unit)


def check_positive(shape: Shape, *numbers: int) -> None:
    """Raise `CodecError` for a shape or sizes of blocks that no weight has."""
    if not 1 <= len(shape) <= _MAX_AXES or any(n < 0 for n in shape) or prod(n or 1 for n in shape) >= 1 << 60:
        raise CodecError(f"no weight has the shape {list(shape)[:_MAX_AXES]}")
    if any(number < 1 for number in numbers):
        raise CodecError("blocks of a quantised weight must have elements")


def to_float32(values: Array) -> Array:
    """Any numbers of at most 32 bits as float32: an array of the same shape."""
    if values.dtype == FLOAT16 and values.size >= MIN_ELEMENTS and values.flags.c_contiguous:
        from ckpt_codecs.native import lossless  # small weights need no kernels

        out = np.empty(values.shape, FLOAT32)
        lossless.from_float16(values.reshape(-1).view(np.uint16), out.reshape(-1).view(np.uint32))
        return out
    with np.errstate(invalid="ignore"):
        return values.astype(FLOAT32)


MIN_ELEMENTS = 1024
"""Values from which on kernels compute: of fewer, NumPy is as fast, and readers load no kernels for them."""


def rounded_into(values: Array, out: Array) -> None:
    """Round float32 values into `out`, of the same shape and any float dtype, to nearest, ties to even."""
    is_contiguous = out.flags.c_contiguous and values.flags.c_contiguous
    if out.dtype in (BFLOAT16, FLOAT16) and values.size >= MIN_ELEMENTS and is_contiguous:
        from ckpt_codecs.native import lossless  # small weights need no kernels

        kernel = lossless.to_bfloat16 if out.dtype == BFLOAT16 else lossless.to_float16
        kernel(values.reshape(-1).view(np.uint32), out.reshape(-1).view(np.uint16))
        return
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, values, casting="unsafe")


def take_block(block: Block, shape: Shape, low: int, flat: Array, out: Array) -> None:
    """Fill `out` with a block of an array of this shape, of which `flat` has a range in C order.

    flat: (n,) of the dtype of `out`, from element `low` on at least to the block's last element.
    """
    strides, step, first = [], flat.itemsize, 0
    for n in reversed(shape):
        strides.append(step)
        step *= n
    for (start, _), n in zip(block, shape, strict=True):
        first = first * n + start
    view = flat[first - low :]
    out[...] = np.lib.stride_tricks.as_strided(view, block_shape(block), strides[::-1], writeable=False)
