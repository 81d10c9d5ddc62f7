"""Floats of every kind, by planes of bytes: exponents are coded, mantissas only where they are not noise."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunked import Levelled
from ckpt_codecs.chunks import LEAST_FLOATS, MOST, Writer, raw, read, same, words
from ckpt_codecs.engine import engine
from ckpt_codecs.errors import CodecError
from ckpt_codecs.kinds import PLANES
from ckpt_codecs.streams import LEVELS, Effort


@dataclass(frozen=True)
class Planes(Levelled):
    """Each byte of a value in a plane of its own, the exponent in one of them."""

    name: ClassVar[str] = "planes"
    lossless: ClassVar[bool] = True

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        bits = words(array)
        if not LEAST_FLOATS <= bits.size <= MOST:
            return same(array) or raw(array, out)
        return same(array) or encode_planes(bits, LEVELS[self.level], out) or raw(array, out)

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        if data[0] != PLANES:
            raise CodecError(f"{self.name} has no chunks of mode {data[0]}")
        decode_planes(data, out)


def encode_planes(bits: Array, effort: Effort, out: Array) -> Bytes | None:
    """A chunk of planes; None if it would be larger than the values."""
    size, width = bits.size, bits.itemsize
    writer = Writer(PLANES, width, size * width, out)
    planes = [writer.plane(size, effort, sure=i == width - 1 and width in (2, 4)) for i in range(width)]
    if width in (2, 4):
        return writer.data(size * width, engine().write_planes(bits, writer.out, effort.worth, effort.survey))
    split(bits, planes)
    return writer.data(size * width)


def decode_planes(data: Bytes, out: Array) -> None:
    bits = words(out)
    if bits.itemsize in (2, 4) and engine().read_planes(np.frombuffer(data, np.uint8), bits):
        return
    merge(read(data, [bits.size] * bits.itemsize), bits)


def split(bits: Array, parts: list[Array]) -> None:
    """Words of any width into planes, the lowest first."""
    width = bits.itemsize
    if width in (2, 4):
        engine().split(bits, parts)
    elif width == 1:
        parts[0][:] = bits
    else:
        turned = bits << np.uint64(1)
        parts[7][:] = turned >> np.uint64(56)
        rest = ((bits >> np.uint64(8)) & np.uint64(1 << 55)) | (bits & np.uint64((1 << 55) - 1))
        for i in range(7):
            parts[i][:] = rest >> np.uint64(8 * i) & np.uint64(255)


def merge(parts: list[Array], bits: Array) -> None:
    width = bits.itemsize
    if width in (2, 4):
        engine().merge(parts, bits)
    elif width == 1:
        bits[:] = parts[0]
    else:
        bits[:] = parts[7]
        bits <<= np.uint64(55)
        for i in range(7):
            low = parts[i].astype(np.uint64) << np.uint64(8 * i)
            if i == 6:
                bits |= (low & np.uint64(1 << 55)) << np.uint64(8)
                low &= np.uint64((1 << 55) - 1)
            bits |= low
