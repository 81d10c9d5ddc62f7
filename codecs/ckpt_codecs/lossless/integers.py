"""Integers and booleans as planes of bytes, of the values or of their differences, or as zstd: what is smallest."""

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
from ckpt_codecs.lossless.zstd import ZSTD_LEVELS, encode_zstd


@dataclass(frozen=True)
class Integers(LeveledCodec):
    """Codec of counters, masks, tokens, positions, quantized weights and states of random generators."""

    name: ClassVar[str] = "integers"
    lossless: ClassVar[bool] = True

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        bits, level = as_uints(array), LEVELS[self.level]
        constant = encode_constant(array)
        if constant is not None or not MIN_ELEMENTS <= bits.size <= MAX_ELEMENTS:
            return constant or encode_raw(array, out)
        chunks = [write_planes(BYTE_PLANES, bits, False, level, out), encode_zstd(array, ZSTD_LEVELS[self.level])]
        if bits.itemsize > 1:
            chunks.append(write_planes(ZIGZAG_PLANES, _to_zigzags(bits), False, level, None))
        smallest = min((chunk for chunk in chunks if chunk is not None), key=len)
        return smallest if len(smallest) <= array.nbytes + 1 else encode_raw(array, out)

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        if data[0] not in (BYTE_PLANES, ZIGZAG_PLANES):
            raise CodecError(f"{self.name} has no chunks of mode {data[0]}")
        bits = as_uints(out)
        read_planes(data, bits, False)
        if data[0] == ZIGZAG_PLANES:
            bits[:] = _from_zigzags(bits)


def _to_zigzags(bits: Array) -> Array:
    """Return the differences between neighbours as unsigned numbers, small ones of either sign as small numbers."""
    differences = np.diff(bits, prepend=bits.dtype.type(0)).view(f"i{bits.itemsize}")
    zigzags: Array = ((differences << 1) ^ (differences >> (8 * bits.itemsize - 1))).view(bits.dtype)
    return zigzags


def _from_zigzags(bits: Array) -> Array:
    one = bits.dtype.type(1)
    differences = (bits >> one) ^ (~(bits & one) + one)
    return np.cumsum(differences, dtype=bits.dtype)
