"""The moments of Adam: their exponents are nearly known from their rows, their columns and each other."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes, DType, Shape
from ckpt_codecs.chunks import LEAST_FLOATS, MOST, Writer, plain, raw, read, same, words
from ckpt_codecs.engine import engine
from ckpt_codecs.errors import CodecError
from ckpt_codecs.kinds import EXPECTED, PLANES, SCALED
from ckpt_codecs.planes import decode_planes, encode_planes
from ckpt_codecs.scratch import borrow
from ckpt_codecs.streams import LEVELS, Effort, Levelled

NARROWEST = 64
"""Values in a row that has a scale of its own."""
FEWEST = 1536
"""Values of a chunk whose scales are worth their time."""
ROWS = Effort(0.6)
"""Scales are few: a code of their own must save much to be worth its table."""
EIGHT_BITS = ("float32", "bfloat16")
"""The types whose exponents have 8 bits."""


@dataclass(frozen=True)
class SecondMoment(Levelled):
    """`exp_avg_sq`, and whatever else varies by rows and columns: exponents less their row's and their column's."""

    name: ClassVar[str] = "second-moment"
    lossless: ClassVar[bool] = True

    def encode(self, array: Array, base: Array | None = None) -> Bytes:
        bits, effort = words(array), LEVELS[self.level]
        if not LEAST_FLOATS <= bits.size <= MOST:
            return same(array) or raw(array)
        return same(array) or self._scaled(array, base, effort) or encode_planes(bits, effort) or raw(array)

    def _scaled(self, array: Array, base: Array | None, effort: Effort) -> Bytes | None:
        """A chunk of residuals; None where they would gain nothing."""
        if array.dtype.name not in EIGHT_BITS or array.size < FEWEST:
            return None
        expected = self._expected(base, array.shape)
        size, columns, width = array.size, columns_of(array.shape), array.itemsize
        if expected is None and columns == size:
            return None
        rows = np.empty(size // columns, np.int16)
        writer = Writer(SCALED if expected is None else EXPECTED, width + 3, size * width + 2 + 2 * rows.size)
        stored = [writer.plane(size, effort) for _ in range(width - 1)]
        least, low, high = (writer.plane(n, ROWS) for n in (2, rows.size, rows.size))
        residuals = writer.plane(size, effort, sure=True)
        ignored = [borrow(name, size) for name in ("ignored0", "ignored1")[: 4 - width]]
        top = borrow("top", size)
        engine().to_residuals(_as_float32(array), expected, columns, rows, [*ignored, *stored, top], residuals)
        if engine().survey(top) * size <= engine().survey(residuals) * size + 8 * rows.size:
            return None
        above = (rows - rows.min()).view(np.uint16)
        least[:] = rows.min(keepdims=True).view(np.uint8)
        low[:], high[:] = above.astype(np.uint8), above >> np.uint16(8)
        return writer.data(size * width)

    def _expected(self, base: Array | None, shape: Shape) -> Array | None:
        """The words of a state that says something of the exponents; None if there is none."""
        return None

    def decode(self, data: Bytes, shape: Shape, dtype: DType, base: Array | None = None) -> Array:
        made = plain(data, shape, dtype)
        if made is not None:
            return made
        if data[0] == PLANES:
            return decode_planes(data, shape, dtype)
        if data[0] not in (SCALED, EXPECTED) or dtype.name not in EIGHT_BITS or not prod(shape):
            raise CodecError(f"{self.name} has no chunks of {dtype} of mode {data[0]}")
        expected = None if data[0] == SCALED else self._expected(base, shape)
        if data[0] == EXPECTED and expected is None:
            raise CodecError(f"a chunk of {self.name} needs the state that it was coded against")
        size, columns, width = prod(shape), columns_of(shape), dtype.itemsize
        sizes = [*[size] * (width - 1), 2, size // columns, size // columns, size]
        *parts, least, low, high, residuals = read(data, sizes)
        rows = (least.copy().view(np.uint16) + low + (high.astype(np.uint16) << np.uint16(8))).view(np.int16)
        made = np.empty(size, np.uint32)
        if width == 2:
            parts = [*[np.zeros(size, np.uint8)] * 2, *parts]
        engine().from_residuals(residuals, parts, expected, columns, rows, made)
        return (made if width == 4 else (made >> np.uint32(16)).astype(np.uint16)).view(dtype).reshape(shape)


@dataclass(frozen=True)
class FirstMoment(SecondMoment):
    """`exp_avg`: about as large as the root of `exp_avg_sq`, which is its base."""

    name: ClassVar[str] = "first-moment"
    context: ClassVar[str | None] = "exp_avg_sq"

    def _expected(self, base: Array | None, shape: Shape) -> Array | None:
        if base is None or base.shape != shape or base.dtype.name not in EIGHT_BITS:
            return None
        return _as_float32(base)


def columns_of(shape: Shape) -> int:
    """Values in a row: the last axes, until they are enough; all of them if they never are, or in a single row."""
    columns = 1
    for length in reversed(shape):
        columns *= length
        if columns >= NARROWEST:
            return columns
    return prod(shape)


def _as_float32(array: Array) -> Array:
    """The words of these values as float32."""
    bits = words(array)
    return bits if bits.itemsize == 4 else bits.astype(np.uint32) << np.uint32(16)
