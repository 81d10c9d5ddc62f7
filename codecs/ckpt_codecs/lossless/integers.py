"""Integers and booleans: planes of bytes, of the values or of their steps, or zstd, whichever is smallest."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.codec import LeveledCodec
from ckpt_codecs.chunk.frame import MAX_ELEMENTS, MIN_ELEMENTS, as_uints, encode_constant, encode_raw
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import BYTE_PLANES, ZIGZAG_PLANES
from ckpt_codecs.lossless.float_planes import read_planes, write_planes
from ckpt_codecs.lossless.zstd import ZSTD_LEVELS, zstd


@dataclass(frozen=True)
class Integers(LeveledCodec):
    """Counters, masks, tokens, positions, quantised weights, random states."""

    name: ClassVar[str] = "integers"
    lossless: ClassVar[bool] = True

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        bits, effort = as_uints(array), LEVELS[self.level]
        found = encode_constant(array)
        if found is not None or not MIN_ELEMENTS <= bits.size <= MAX_ELEMENTS:
            return found or encode_raw(array, out)
        tried = [write_planes(BYTE_PLANES, bits, False, effort, out), zstd(array, ZSTD_LEVELS[self.level])]
        if bits.itemsize > 1:
            tried.append(write_planes(ZIGZAG_PLANES, _steps(bits), False, effort, None))
        least = min((chunk for chunk in tried if chunk is not None), key=len)
        return least if len(least) <= array.nbytes + 1 else encode_raw(array, out)

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        if data[0] not in (BYTE_PLANES, ZIGZAG_PLANES):
            raise CodecError(f"{self.name} has no chunks of mode {data[0]}")
        bits = as_uints(out)
        read_planes(data, bits, False)
        if data[0] == ZIGZAG_PLANES:
            bits[:] = _from_steps(bits)


def _steps(bits: Array) -> Array:
    """Differences from value to value, small ones of either sign as small numbers."""
    steps = np.diff(bits, prepend=bits.dtype.type(0)).view(f"i{bits.itemsize}")
    made: Array = ((steps << 1) ^ (steps >> (8 * bits.itemsize - 1))).view(bits.dtype)
    return made


def _from_steps(bits: Array) -> Array:
    one = bits.dtype.type(1)
    steps = (bits >> one) ^ (~(bits & one) + one)
    return np.cumsum(steps, dtype=bits.dtype)
