"""The moments of Adam: their exponents are nearly known from their rows, their columns and each other."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes, Shape
from ckpt_codecs.chunked import Levelled
from ckpt_codecs.chunks import LEAST_FLOATS, MOST, Writer, raw, read, same, words
from ckpt_codecs.engine import engine
from ckpt_codecs.errors import CodecError
from ckpt_codecs.kinds import EXPECTED, PLANES, SCALED
from ckpt_codecs.planes import decode_planes, encode_planes
from ckpt_codecs.scratch import borrow
from ckpt_codecs.streams import LEVELS, Effort

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

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        bits, effort = words(array), LEVELS[self.level]
        if not LEAST_FLOATS <= bits.size <= MOST:
            return same(array) or raw(array, out)
        return (
            same(array) or self._scaled(array, base, effort, out) or encode_planes(bits, effort, out) or raw(array, out)
        )

    def _scaled(self, array: Array, base: Array | None, effort: Effort, out: Array) -> Bytes | None:
        """A chunk of residuals; None where they would gain nothing."""
        if array.dtype.name not in EIGHT_BITS or array.size < FEWEST:
            return None
        expected = self._expected(base, array.shape)
        size, columns, width = array.size, columns_of(array.shape), array.itemsize
        if expected is None and columns == size:
            return None
        many = size // columns
        writer = Writer(SCALED if expected is None else EXPECTED, width + 3, size * width + 2 + 2 * many, out)
        for _ in range(width - 1):
            writer.plane(size, effort)
        for n in (2, many, many):
            writer.plane(n, ROWS)
        writer.plane(size, effort, sure=True)
        given = writer.out, effort.worth, effort.survey, ROWS.worth
        begun = engine().write_residuals(_as_float32(array, "values"), expected, columns, width, *given)
        return None if begun is None else writer.data(size * width, begun)

    def _expected(self, base: Array | None, shape: Shape) -> Array | None:
        """The words of a state that says something of the exponents; None if there is none."""
        return None

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        if data[0] == PLANES:
            decode_planes(data, out)
            return
        shape, width = out.shape, out.itemsize
        if data[0] not in (SCALED, EXPECTED) or out.dtype.name not in EIGHT_BITS or not out.size:
            raise CodecError(f"{self.name} has no chunks of {out.dtype} of mode {data[0]}")
        expected = None if data[0] == SCALED else self._expected(base, shape)
        if data[0] == EXPECTED and expected is None:
            raise CodecError(f"a chunk of {self.name} needs the state that it was coded against")
        size, columns, made = out.size, columns_of(shape), words(out)
        if width == 4 and engine().read_residuals(np.frombuffer(data, np.uint8), expected, columns, made):
            return
        sizes = [*[size] * (width - 1), 2, size // columns, size // columns, size]
        *parts, least, low, high, residuals = read(data, sizes)
        rows = (least.copy().view(np.uint16) + low + (high.astype(np.uint16) << np.uint16(8))).view(np.int16)
        if width == 4:
            engine().from_residuals(residuals, parts, expected, columns, rows, made)
            return
        zeros, wide = borrow("zeros", size), borrow("wide", 4 * size).view(np.uint32)
        zeros[:] = 0
        engine().from_residuals(residuals, [zeros, zeros, *parts], expected, columns, rows, wide)
        np.right_shift(wide, np.uint32(16), out=made, casting="unsafe")


@dataclass(frozen=True)
class FirstMoment(SecondMoment):
    """`exp_avg`: about as large as the root of `exp_avg_sq`, which is its base."""

    name: ClassVar[str] = "first-moment"
    context: ClassVar[str | None] = "exp_avg_sq"

    def _expected(self, base: Array | None, shape: Shape) -> Array | None:
        if base is None or base.shape != shape or base.dtype.name not in EIGHT_BITS:
            return None
        return _as_float32(base, "base")


def columns_of(shape: Shape) -> int:
    """Values in a row: the last axes, until they are enough; all of them if they never are, or in a single row."""
    columns = 1
    for length in reversed(shape):
        columns *= length
        if columns >= NARROWEST:
            return columns
    return prod(shape)


def _as_float32(array: Array, scratch: str) -> Array:
    """The words of these values as float32."""
    bits = words(array)
    if bits.itemsize == 4:
        return bits
    wide = borrow(scratch, 4 * bits.size).view(np.uint32)
    return np.left_shift(bits, np.uint32(16), out=wide)
