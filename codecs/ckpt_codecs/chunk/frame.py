"""The frame of a chunk, which all codecs share: the mode, the directory of streams, and the trivial modes."""

from collections.abc import Sequence
from itertools import accumulate
from struct import Struct
from typing import NoReturn

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk import streams
from ckpt_codecs.chunk.streams import CodingLevel
from ckpt_codecs.chunk.zstd import decompress
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import ENTRY, RAW, SAME_VALUE, ZSTD
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer

MIN_ELEMENTS = 16
"""Elements from which on a chunk may save more than its directory takes."""
MIN_FLOATS = 512
"""The same of floats, of whose bits a code saves a fifth at best: smaller chunks, as of norms and biases, are raw."""
MAX_ELEMENTS = 1 << 28
"""Elements up to which a chunk is coded, because sizes have 32 bits; larger ones are raw."""


def as_uints(array: Array) -> Array:
    """Return the bits of an array of any shape and dtype: (n,) uint8, uint16, uint32 or uint64, a view if possible.

    A complex number is two values; a number of more than 8 bytes is as many bytes.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(f"f{flat.itemsize // 2}")
    if flat.itemsize > 8:
        return flat.view(np.uint8)
    bits = flat.view(f"u{flat.itemsize}")
    return bits if bits.flags.aligned else bits.copy()


def encode_raw(array: Array, out: Array) -> Bytes:
    """Return a chunk of the raw values. `array`: any shape and dtype. `out`: (m,) uint8, used if it is large enough."""
    end = 1 + array.nbytes
    chunk = out if out.size >= end else np.empty(end, np.uint8)
    chunk[0] = RAW
    chunk[1:end] = as_uints(array).view(np.uint8)
    return chunk[:end].data


def encode_constant(array: Array) -> bytes | None:
    """Return a chunk of an array (any shape and dtype) whose values all have the same bits; None if they differ."""
    bits = as_uints(array)
    if not bits.size or bits[0] != bits[-1] or bits[0] != bits[bits.size // 2]:
        return None
    differs = np.not_equal(bits, bits[0], out=thread_buffer("differs", bits.size).view(np.bool_))
    return None if differs.any() else bytes([SAME_VALUE]) + bits[:1].tobytes()


def decode_trivial(data: Bytes, out: Array) -> bool:
    """Fill `out` from a chunk of a mode that every codec has: raw, constant or zstd. False if it has another mode.

    `out`: any shape and dtype, C-contiguous.
    """
    if not data:
        raise CodecError("a chunk has at least one byte")
    bits = as_uints(out)
    if data[0] == RAW:
        if len(data) - 1 != out.nbytes:
            raise CodecError(f"{len(data) - 1} raw bytes are not {out.size} values of {out.dtype}")
        bits.view(np.uint8)[:] = np.frombuffer(data, np.uint8, offset=1)
    elif data[0] == SAME_VALUE:
        value = np.frombuffer(data[1:], np.uint8)
        if value.size != bits.itemsize:
            raise CodecError(f"{value.size} bytes are not one value of {out.dtype}")
        bits[:] = value.view(bits.dtype)
    elif data[0] == ZSTD:
        content = decompress(np.frombuffer(data, np.uint8, offset=1), out.nbytes)
        bits.view(np.uint8)[:] = np.frombuffer(content, np.uint8)
    else:
        return False
    return True


def allocate_chunk(mode: int, streams: int, plane_nbytes: int, out: Array | None = None) -> Array:
    """Return a buffer for a chunk, (m,) uint8, whose first byte is the mode: `out` if it is large enough.

    `streams`: their number. `plane_nbytes`: bytes of all planes together. `out`: uint8.
    """
    size = 1 + ENTRY * streams + plane_nbytes
    chunk = out if out is not None and out.size >= size else np.empty(size, np.uint8)
    chunk[0] = mode
    return chunk


class ChunkWriter:
    """Writes a chunk: first the planes, each in place of its stream, then the directory and the coded streams.

    Each plane lies where its stream begins if nothing before it is coded, so that a stored stream need not be moved.
    """

    def __init__(self, mode: int, streams: int, plane_nbytes: int, out: Array | None = None) -> None:
        """See `allocate_chunk`. `out`: (m,) uint8."""
        self._end = 1 + ENTRY * streams
        self.out = allocate_chunk(mode, streams, plane_nbytes, out)
        self._sizes: list[int] = []
        self._max_ratios: list[float] = []
        self._sampled: list[bool] = []

    def plane(self, size: int, level: CodingLevel, always_try: bool = False) -> Array:
        """Return a buffer, (size,) uint8, for the plane of the next stream. The caller fills it before `finish`.

        `always_try`: code the plane without an estimate from a sample.
        """
        start, self._end = self._end, self._end + size
        self._sizes.append(size)
        self._max_ratios.append(level.max_ratio)
        self._sampled.append(level.sampled and not always_try)
        return self.out[start : self._end]

    def add(self, plane: Array, level: CodingLevel, always_try: bool = False) -> None:
        """Append the stream of a plane, (n,) uint8, which is copied."""
        self.plane(plane.size, level, always_try)[:] = plane

    def finish(self, max_nbytes: int) -> memoryview | None:
        """Return the chunk; None if it has more bytes than `max_nbytes`."""
        end = lossless.write_streams(self._sizes, self._max_ratios, self._sampled, self.out)
        return self.out[:end].data if end <= max_nbytes else None


def read_chunk(data: Bytes, sizes: Sequence[int], scratch: str = "planes") -> list[Array]:
    """Return the planes of the streams of a chunk: (size,) uint8 each, views or this thread's buffer `scratch`.

    Raises:
        CodecError: The chunk is damaged, or its streams have other sizes.
    """
    source, start = np.frombuffer(data, np.uint8), 1 + ENTRY * len(sizes)
    if len(data) < start:
        raise CodecError("a chunk ends in its directory")
    directory = Struct("<" + "BI" * len(sizes)).unpack_from(data, 1)
    kinds, starts = directory[::2], list(accumulate(directory[1::2], initial=start))
    if starts[-1] > len(data):
        raise CodecError("a chunk ends in a stream")
    if starts[-1] < len(data):
        raise CodecError("a chunk has bytes after its last stream")
    return streams.read(source, kinds, starts, sizes, scratch)


def raise_damaged(data: Bytes, sizes: Sequence[int]) -> NoReturn:
    """Raise the CodecError that states why kernels cannot read a chunk with streams of these sizes."""
    read_chunk(data, sizes)
    raise CodecError("a chunk is damaged")
