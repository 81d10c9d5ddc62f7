"""Gradients as 8-bit codes, with one scale for each block."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes, Shape
from ckpt_codecs.chunk import streams
from ckpt_codecs.chunk.frame import as_uints, encode_constant, encode_raw
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import BLOCKS, COLUMNS, ENTRY
from ckpt_codecs.gradients.chunk import GradientCodec, append, chunk_buffer, put_number, take_number
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossless.moments import columns_of
from ckpt_codecs.native import gradients as kernels
from ckpt_codecs.native import lossless
from ckpt_codecs.native.gradients import BLOCK, MAX_COLUMNS
from ckpt_codecs.scratch import thread_buffer

HEAD = 1 + ENTRY
COLUMNS_HEAD = 9
"""Bytes of a chunk of mode 12 before the classes: the mode, the columns, the elements that the first row lacks."""
STORED_SCALE = np.uint32(0x7FC00000)
"""The bits in the place of the scale of a block that is stored as it is."""


@dataclass(frozen=True)
class Int8Gradients(GradientCodec):
    """Quantizes each value to the nearest of 255 multiples of the scale of its block of 512 values, ties to even.

    A scale is the largest magnitude of its block over 127, rounded up to 16 significant bits, so that multiples are
    exact. The error of a decoded finite value is at most half the scale; zero decodes to 0.0. Three kinds of blocks are
    exact: those with a NaN or an infinity, those with a scale below 2**-125, and those with an infinite product.

    The codes of a range of a matrix are split into four classes by row and column if that makes the chunk smaller.
    """

    name: ClassVar[str] = "gradients-int8"
    lossless: ClassVar[bool] = False

    def encode_range(self, array: Array, shape: Shape | None, start: int) -> Bytes:
        out = chunk_buffer(array, np.empty(0, np.uint8))
        return self._encode_chunk(array, columns_of(shape or (array.size,)), start, out)

    def _encode(self, array: Array, out: Array) -> Bytes:
        return self._encode_chunk(array, columns_of(array.shape), 0, out)

    def _encode_chunk(self, array: Array, columns: int, start: int, out: Array) -> Bytes:
        by_columns = 1 < columns <= min(array.size // 2, MAX_COLUMNS)
        matrix = (columns, start % columns) if by_columns else None
        return encode_constant(array) or self._encode_blocks(as_uints(array), matrix, out) or encode_raw(array, out)

    def _encode_blocks(self, bits: Array, matrix: tuple[int, int] | None, out: Array) -> Bytes | None:
        """A chunk of mode 10, or 12 for a matrix; None if it is not smaller than the values.

        `bits`: (n,) uint32; `matrix`: its columns, and how many elements of its first row are missing; `out`: uint8.
        """
        scales = thread_buffer("gradients-scales", 4 * _blocks(bits.size)).view(np.uint32)
        codes = thread_buffer("gradients-codes", bits.size) if matrix else out[HEAD : HEAD + bits.size]
        stored = kernels.quantise_blocks(bits, scales, codes)
        if 2 * stored > scales.size or not bits.size:
            return None
        taken = kernels.write_columns(codes, *matrix, out[COLUMNS_HEAD:]) if matrix else 0
        if matrix and taken:
            mode, at = COLUMNS, COLUMNS_HEAD + taken
            put_number(out, 1, matrix[0])
            put_number(out, 5, matrix[1])
        else:
            if matrix:
                out[HEAD : HEAD + bits.size] = codes
            coding = LEVELS[self.level]
            mode, at = BLOCKS, lossless.write_streams([bits.size], [coding.max_ratio], [coding.sampled], out)
        inner = Planes(self.level).encode_into(scales.view(np.float32), None, out[at + 4 :])
        put_number(out, at, len(inner))
        end = append(inner, out, at + 4)
        for start, stop in _stored_blocks(scales, bits.size) if stored else ():
            if end + 4 * (stop - start) > bits.nbytes:
                return None
            end = append(bits[start:stop].view(np.uint8).data, out, end)
        out[0] = mode
        return out[:end].data if end <= bits.nbytes else None

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        if data[0] not in (BLOCKS, COLUMNS):
            raise CodecError(f"{self.name} has no chunks of mode {data[0]}")
        bits, source = as_uints(out), np.frombuffer(data, np.uint8)
        at, codes = (_read_columns if data[0] == COLUMNS else _read_codes)(data, source, bits.size)
        middle = at + 4
        end = middle + take_number(data, at)
        if end > len(data):
            raise CodecError("a chunk ends inside its scales")
        scales = thread_buffer("gradients-scales", 4 * _blocks(bits.size)).view(np.uint32)
        Planes().decode_into(data[middle:end], scales.view(np.float32), None)
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


def _read_codes(data: Bytes, source: Array, size: int) -> tuple[int, Array]:
    """The end of the codes of a chunk of mode 10, and these, (size,) uint8. `source`: the bytes of `data`, as uint8."""
    end = HEAD + take_number(data, 2)
    return end, streams.read(source, [data[1]], [HEAD, end], [size], "gradients-codes")[0]


def _read_columns(data: Bytes, source: Array, size: int) -> tuple[int, Array]:
    """The same of a chunk of mode 12."""
    columns, skipped = take_number(data, 1), take_number(data, 5)
    if not 1 <= columns <= min(size, MAX_COLUMNS) or skipped >= columns:
        raise CodecError(f"a chunk of {size} values is no part of {columns} columns from {skipped} on")
    codes = thread_buffer("gradients-codes", size)
    taken = kernels.read_columns(source[COLUMNS_HEAD:], columns, skipped, codes)
    if not taken:
        raise CodecError("a class of rows and columns is damaged")
    return COLUMNS_HEAD + taken, codes


def _blocks(size: int) -> int:
    """The count of blocks of `size` values. The last block may be shorter."""
    return -(-size // BLOCK)


def _stored_blocks(scales: Array, size: int) -> list[tuple[int, int]]:
    """The start and stop of each stored block among `size` values, ascending. `scales`: (k,) uint32."""
    starts = (BLOCK * np.flatnonzero(scales == STORED_SCALE)).tolist()
    return [(start, min(start + BLOCK, size)) for start in starts]
