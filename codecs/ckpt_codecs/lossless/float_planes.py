"""Floats as planes of bytes: exponents are coded, mantissas only where they are not noise."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes
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
from ckpt_codecs.format_ids import FLOAT_PLANES
from ckpt_codecs.native import lossless


@dataclass(frozen=True)
class Planes(LeveledCodec):
    """Codec of floats of every kind: each byte of a value is in its own plane, the exponent in one of them."""

    name: ClassVar[str] = "planes"
    lossless: ClassVar[bool] = True

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        bits = as_uints(array)
        if not MIN_FLOATS <= bits.size <= MAX_ELEMENTS:
            return encode_constant(array) or encode_raw(array, out)
        return encode_constant(array) or encode_planes(bits, LEVELS[self.level], out) or encode_raw(array, out)

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        if data[0] != FLOAT_PLANES:
            raise CodecError(f"{self.name} has no chunks of mode {data[0]}")
        decode_planes(data, out)


def encode_planes(bits: Array, level: CodingLevel, out: Array) -> Bytes | None:
    """Return a chunk of mode "float planes"; None if it is larger than the values.

    `bits`: (n,) uint8, uint16, uint32 or uint64. `out`: (m,) uint8, used if it is large enough.
    """
    return write_planes(FLOAT_PLANES, bits, True, level, out)


def decode_planes(data: Bytes, out: Array) -> None:
    """Fill `out`, any shape and dtype, from a chunk of mode "float planes". Raises CodecError if it is damaged."""
    read_planes(data, as_uints(out), True)


def write_planes(mode: int, bits: Array, floats: bool, level: CodingLevel, out: Array | None) -> Bytes | None:
    """Return a chunk with one stream for each byte of a value; None if it is larger than the values.

    `bits`: (n,) uint8, uint16, uint32 or uint64. `floats`: the exponent has its own plane. `out`: (m,) uint8, used if
    it is large enough.
    """
    chunk = allocate_chunk(mode, bits.itemsize, bits.nbytes, out)
    end = lossless.write_planes(bits, floats, level.max_ratio, level.sampled, chunk)
    return chunk[:end].data if end <= bits.nbytes else None


def read_planes(data: Bytes, bits: Array, floats: bool) -> None:
    """Fill `bits` from a chunk of `write_planes`. `bits`: (n,) uint8, uint16, uint32 or uint64.

    Raises:
        CodecError: The chunk is damaged.
    """
    if not lossless.read_planes(np.frombuffer(data, np.uint8), floats, bits):
        raise_damaged(data, [bits.size] * bits.itemsize)
