"""Floats of every kind, by planes of bytes: exponents are coded, mantissas only where they are not noise."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes
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
from ckpt_codecs.format_ids import FLOAT_PLANES
from ckpt_codecs.native import lossless


@dataclass(frozen=True)
class Planes(LeveledCodec):
    """Each byte of a value in a plane of its own, the exponent in one of them."""

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


def encode_planes(bits: Array, effort: CodingLevel, out: Array) -> Bytes | None:
    """A chunk of planes; None if it would be larger than the values."""
    return write_planes(FLOAT_PLANES, bits, True, effort, out)


def decode_planes(data: Bytes, out: Array) -> None:
    read_planes(data, as_uints(out), True)


def write_planes(mode: int, bits: Array, floats: bool, effort: CodingLevel, out: Array | None) -> Bytes | None:
    """A chunk of a stream for each byte of a word; None if it would be larger than the words."""
    made = begin(mode, bits.itemsize, bits.nbytes, out)
    end = lossless.write_planes(bits, floats, effort.max_ratio, effort.sampled, made)
    return made[:end].data if end <= bits.nbytes else None


def read_planes(data: Bytes, bits: Array, floats: bool) -> None:
    """Fill words from a chunk that `write_planes` made."""
    if not lossless.read_planes(np.frombuffer(data, np.uint8), floats, bits):
        lossless.read_planes(with_stored_streams(data, [bits.size] * bits.itemsize), floats, bits)
