"""The moments of Adam: an exponent is predicted from its row, its column and the other moment."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes, Shape
from ckpt_codecs.chunk.codec import LeveledCodec
from ckpt_codecs.chunk.frame import (
    MAX_ELEMENTS,
    MIN_FLOATS,
    allocate_chunk,
    as_uints,
    encode_constant,
    encode_raw,
    raise_damaged,
)
from ckpt_codecs.chunk.streams import LEVELS, CodingLevel
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import FLOAT_PLANES, ROWS_AND_CONTEXT, ROWS_ONLY
from ckpt_codecs.lossless.float_planes import decode_planes, encode_planes
from ckpt_codecs.native import lossless

MIN_ROW_SIZE = 64
"""Values from which on a row has its own scale."""
MIN_VALUES = 1536
"""Values from which on the scales of a chunk save more than their time costs."""
SCALE_LEVEL = CodingLevel(0.6)
"""The level of the scales' streams: they are short, so a code must save much to be worth its table."""
EIGHT_BIT_EXPONENTS = ("float32", "bfloat16")
"""The dtypes whose exponents have 8 bits."""


@dataclass(frozen=True)
class SecondMoment(LeveledCodec):
    """Codec of `exp_avg_sq` and other states that vary by rows and columns: exponents minus predictions from these."""

    name: ClassVar[str] = "second-moment"
    lossless: ClassVar[bool] = True

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        bits, level = as_uints(array), LEVELS[self.level]
        if not MIN_FLOATS <= bits.size <= MAX_ELEMENTS:
            return encode_constant(array) or encode_raw(array, out)
        return (
            encode_constant(array)
            or self._encode_residuals(array, base, level, out)
            or encode_planes(bits, level, out)
            or encode_raw(array, out)
        )

    def _encode_residuals(self, array: Array, base: Array | None, level: CodingLevel, out: Array) -> Bytes | None:
        """Return a chunk of the residuals of exponents; None if it saves nothing."""
        if array.dtype.name not in EIGHT_BIT_EXPONENTS or array.size < MIN_VALUES:
            return None
        context = self._context_bits(base, array.shape)
        if context is None and columns_of(array.shape) == array.size:
            return None
        columns, rows = columns_of(array.shape), array.size // columns_of(array.shape)
        mode = ROWS_ONLY if context is None else ROWS_AND_CONTEXT
        chunk = allocate_chunk(mode, array.itemsize + 3, array.nbytes + 2 + 2 * rows, out)
        limits = level.max_ratio, level.sampled, SCALE_LEVEL.max_ratio
        end = lossless.write_residuals(as_uints(array), context, columns, *limits, chunk)
        return chunk[:end].data if 0 < end <= array.nbytes else None

    def _context_bits(self, base: Array | None, shape: Shape) -> Array | None:
        """Return the bits of the base, (n,) uint16 or uint32, which predicts the exponents; None if there is none."""
        return None

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        if data[0] == FLOAT_PLANES:
            decode_planes(data, out)
            return
        shape, width = out.shape, out.itemsize
        if data[0] not in (ROWS_ONLY, ROWS_AND_CONTEXT) or out.dtype.name not in EIGHT_BIT_EXPONENTS or not out.size:
            raise CodecError(f"{self.name} has no chunks of {out.dtype} of mode {data[0]}")
        context = None if data[0] == ROWS_ONLY else self._context_bits(base, shape)
        if data[0] == ROWS_AND_CONTEXT and context is None:
            raise CodecError(f"a chunk of {self.name} needs its base: the state that it was encoded with")
        size, columns, bits = out.size, columns_of(shape), as_uints(out)
        if not lossless.read_residuals(np.frombuffer(data, np.uint8), context, columns, bits):
            raise_damaged(data, [*[size] * (width - 1), 2, size // columns, size // columns, size])


@dataclass(frozen=True)
class FirstMoment(SecondMoment):
    """Codec of `exp_avg`, which is about as large as the square root of its base, `exp_avg_sq`."""

    name: ClassVar[str] = "first-moment"
    context: ClassVar[str | None] = "exp_avg_sq"

    def _context_bits(self, base: Array | None, shape: Shape) -> Array | None:
        if base is None or base.shape != shape or base.dtype.name not in EIGHT_BIT_EXPONENTS:
            return None
        return as_uints(base)


def columns_of(shape: Shape) -> int:
    """Return the number of values in a row: the last axes, as many as it takes; all axes if they are not enough."""
    columns = 1
    for length in reversed(shape):
        columns *= length
        if columns >= MIN_ROW_SIZE:
            return columns
    return prod(shape)
