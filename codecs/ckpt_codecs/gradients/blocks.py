"""Gradients as 8-bit codes, with one scale for each block."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk import streams
from ckpt_codecs.chunk.frame import as_uints, encode_constant, encode_raw
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import BLOCKS, ENTRY
from ckpt_codecs.gradients.chunk import GradientCodec, append, put_number, take_number
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.native import gradients as kernels
from ckpt_codecs.native import lossless
from ckpt_codecs.native.gradients import BLOCK
from ckpt_codecs.scratch import thread_buffer

HEAD = 1 + ENTRY
STORED_SCALE = np.uint32(0x7FC00000)
"""The bits in the place of the scale of a block that is stored as it is."""


@dataclass(frozen=True)
class Int8Gradients(GradientCodec):
    """Quantizes each value to the nearest of 255 multiples of the scale of its block of 512 values, ties to even.

    A scale is the largest magnitude of its block over 127, rounded up to 16 significant bits, so that multiples are
    exact. The error of a decoded finite value is at most half the scale; zero decodes to 0.0. Three kinds of blocks are
    exact: those with a NaN or an infinity, those with a scale below 2**-125, and those with an infinite product.
    """

    name: ClassVar[str] = "gradients-int8"
    lossless: ClassVar[bool] = False

    def _encode(self, array: Array, out: Array) -> Bytes:
        return encode_constant(array) or self._encode_blocks(as_uints(array), out) or encode_raw(array, out)

    def _encode_blocks(self, bits: Array, out: Array) -> Bytes | None:
        """A chunk of mode 10; None if it is not smaller than the values. `bits`: (n,) uint32; `out`: uint8."""
        scales = thread_buffer("gradients-scales", 4 * _blocks(bits.size)).view(np.uint32)
        stored = kernels.quantise_blocks(bits, scales, out[HEAD : HEAD + bits.size])
        if 2 * stored > scales.size or not bits.size:
            return None
        coding = LEVELS[self.level]
        at = lossless.write_streams([bits.size], [coding.max_ratio], [coding.sampled], out)
        inner = Planes(self.level).encode_into(scales.view(np.float32), None, out[at + 4 :])
        put_number(out, at, len(inner))
        end = append(inner, out, at + 4)
        for start, stop in _stored_blocks(scales, bits.size) if stored else ():
            if end + 4 * (stop - start) > bits.nbytes:
                return None
            end = append(bits[start:stop].view(np.uint8).data, out, end)
        out[0] = BLOCKS
        return out[:end].data if end <= bits.nbytes else None

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        if data[0] != BLOCKS:
            raise CodecError(f"{self.name} has no chunks of mode {data[0]}")
        bits = as_uints(out)
        at = HEAD + take_number(data, 2)
        middle = at + 4
        end = middle + take_number(data, at)
        if end > len(data):
            raise CodecError("a chunk ends inside its scales")
        source = np.frombuffer(data, np.uint8)
        scales = thread_buffer("gradients-scales", 4 * _blocks(bits.size)).view(np.uint32)
        Planes().decode_into(data[middle:end], scales.view(np.float32), None)
        codes = streams.read(source, [data[1]], [HEAD, at], [bits.size], "gradients-codes")[0]
        if not kernels.restore_blocks(codes, scales, bits):
            raise CodecError("a scale is not a number of 16 significant bits")
        stored = _stored_blocks(scales, bits.size)
        exact = data[end:]
        if len(exact) != 4 * sum(stop - start for start, stop in stored):
            raise CodecError(f"a chunk has {len(exact)} bytes of stored blocks, which is not their size")
        at = 0
        for start, stop in stored:
            size = 4 * (stop - start)
            bits[start:stop].view(np.uint8)[:] = np.frombuffer(exact[at : at + size], np.uint8)
            at += size


def _blocks(size: int) -> int:
    """The count of blocks of `size` values. The last block may be shorter."""
    return -(-size // BLOCK)


def _stored_blocks(scales: Array, size: int) -> list[tuple[int, int]]:
    """The start and stop of each stored block among `size` values, ascending. `scales`: (k,) uint32."""
    starts = (BLOCK * np.flatnonzero(scales == STORED_SCALE)).tolist()
    return [(start, min(start + BLOCK, size)) for start in starts]
