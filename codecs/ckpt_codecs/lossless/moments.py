"""The moments of Adam: their exponents are nearly known from their rows, their columns and each other."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes, Shape
from ckpt_codecs.chunk.codec import LeveledCodec
from ckpt_codecs.chunk.frame import (
    MAX_ELEMENTS,
    MIN_FLOATS,
    as_uints,
    begin,
    encode_constant,
    encode_raw,
    with_stored_streams,
)
from ckpt_codecs.chunk.streams import LEVELS, CodingLevel
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import FLOAT_PLANES, ROWS_AND_CONTEXT, ROWS_ONLY
from ckpt_codecs.lossless.float_planes import decode_planes, encode_planes
from ckpt_codecs.native import lossless

NARROWEST = 64
"""Values in a row that has a scale of its own."""
FEWEST = 1536
"""Values of a chunk whose scales are worth their time."""
ROWS = CodingLevel(0.6)
"""Scales are few: a code of their own must save much to be worth its table."""
EIGHT_BITS = ("float32", "bfloat16")
"""The types whose exponents have 8 bits."""


@dataclass(frozen=True)
class SecondMoment(LeveledCodec):
    """`exp_avg_sq`, and whatever else varies by rows and columns: exponents less their row's and their column's."""

    name: ClassVar[str] = "second-moment"
    lossless: ClassVar[bool] = True

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        bits, effort = as_uints(array), LEVELS[self.level]
        if not MIN_FLOATS <= bits.size <= MAX_ELEMENTS:
            return encode_constant(array) or encode_raw(array, out)
        return (
            encode_constant(array)
            or self._scaled(array, base, effort, out)
            or encode_planes(bits, effort, out)
            or encode_raw(array, out)
        )

    def _scaled(self, array: Array, base: Array | None, effort: CodingLevel, out: Array) -> Bytes | None:
        """A chunk of residuals; None where they would gain nothing."""
        if array.dtype.name not in EIGHT_BITS or array.size < FEWEST:
            return None
        expected = self._expected(base, array.shape)
        if expected is None and columns_of(array.shape) == array.size:
            return None
        columns, rows = columns_of(array.shape), array.size // columns_of(array.shape)
        mode = ROWS_ONLY if expected is None else ROWS_AND_CONTEXT
        made = begin(mode, array.itemsize + 3, array.nbytes + 2 + 2 * rows, out)
        tried = effort.max_ratio, effort.sampled, ROWS.max_ratio
        end = lossless.write_residuals(as_uints(array), expected, columns, *tried, made)
        return made[:end].data if 0 < end <= array.nbytes else None

    def _expected(self, base: Array | None, shape: Shape) -> Array | None:
        """The words of a state that says something of the exponents; None if there is none."""
        return None

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        if data[0] == FLOAT_PLANES:
            decode_planes(data, out)
            return
        shape, width = out.shape, out.itemsize
        if data[0] not in (ROWS_ONLY, ROWS_AND_CONTEXT) or out.dtype.name not in EIGHT_BITS or not out.size:
            raise CodecError(f"{self.name} has no chunks of {out.dtype} of mode {data[0]}")
        expected = None if data[0] == ROWS_ONLY else self._expected(base, shape)
        if data[0] == ROWS_AND_CONTEXT and expected is None:
            raise CodecError(f"a chunk of {self.name} needs the state that it was coded against")
        size, columns, bits = out.size, columns_of(shape), as_uints(out)
        if not lossless.read_residuals(np.frombuffer(data, np.uint8), expected, columns, bits):
            sizes = [*[size] * (width - 1), 2, size // columns, size // columns, size]
            lossless.read_residuals(with_stored_streams(data, sizes), expected, columns, bits)


@dataclass(frozen=True)
class FirstMoment(SecondMoment):
    """`exp_avg`: about as large as the root of `exp_avg_sq`, which is its base."""

    name: ClassVar[str] = "first-moment"
    context: ClassVar[str | None] = "exp_avg_sq"

    def _expected(self, base: Array | None, shape: Shape) -> Array | None:
        if base is None or base.shape != shape or base.dtype.name not in EIGHT_BITS:
            return None
        return as_uints(base)


def columns_of(shape: Shape) -> int:
    """Values in a row: the last axes, until they are enough; all of them if they never are, or in a single row."""
    columns = 1
    for length in reversed(shape):
        columns *= length
        if columns >= NARROWEST:
            return columns
    return prod(shape)
