"""What all codecs of chunks share: the first byte, the directory of streams, and the plain ways to hold a chunk."""

from collections.abc import Sequence
from itertools import accumulate
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk import streams
from ckpt_codecs.chunk.streams import CodingLevel
from ckpt_codecs.chunk.zstd import expand
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import ENTRY, RAW, SAME_VALUE, STORED, ZSTD
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer

MIN_ELEMENTS = 16
"""Elements of a chunk that is worth a directory."""
MIN_FLOATS = 512
"""The same of floats, of whose bits a code saves a fifth at best: norms and biases are held raw."""
MAX_ELEMENTS = 1 << 28
"""Elements of a chunk that is coded at all; larger ones are held raw, since sizes have 32 bits."""


def as_uints(array: Array) -> Array:
    """The bits of an array as unsigned words, flat; a complex number is two."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(f"f{flat.itemsize // 2}")
    if flat.itemsize > 8:
        return flat.view(np.uint8)
    bits = flat.view(f"u{flat.itemsize}")
    return bits if bits.flags.aligned else bits.copy()


def encode_raw(array: Array, out: Array) -> Bytes:
    """A chunk of the values as they are."""
    end = 1 + array.nbytes
    made = out if out.size >= end else np.empty(end, np.uint8)
    made[0] = RAW
    made[1:end] = as_uints(array).view(np.uint8)
    return made[:end].data


def encode_constant(array: Array) -> bytes | None:
    """A chunk of one value over and over, if it is one."""
    bits = as_uints(array)
    if not bits.size or bits[0] != bits[-1] or bits[0] != bits[bits.size // 2]:
        return None
    differs = np.not_equal(bits, bits[0], out=thread_buffer("differs", bits.size).view(np.bool_))
    return None if differs.any() else bytes([SAME_VALUE]) + bits[:1].tobytes()


def decode_trivial(data: Bytes, out: Array) -> bool:
    """Fill `out` from a chunk that is held in a way that every codec knows; False if this one is not."""
    if not data:
        raise CodecError("a chunk has at least one byte")
    made = as_uints(out)
    if data[0] == RAW:
        if len(data) - 1 != out.nbytes:
            raise CodecError(f"{len(data) - 1} raw bytes are not {out.size} values of {out.dtype}")
        made.view(np.uint8)[:] = np.frombuffer(data, np.uint8, offset=1)
    elif data[0] == SAME_VALUE:
        value = np.frombuffer(data[1:], np.uint8)
        if value.size != made.itemsize:
            raise CodecError(f"{value.size} bytes are not one value of {out.dtype}")
        made[:] = value.view(made.dtype)
    elif data[0] == ZSTD:
        made.view(np.uint8)[:] = np.frombuffer(expand(np.frombuffer(data, np.uint8, offset=1), out.nbytes), np.uint8)
    else:
        return False
    return True


def begin(mode: int, streams: int, room: int, out: Array | None = None) -> Array:
    """Memory for a chunk of so many streams, of which the first byte is written: `out`, if it is large enough.

    `room`: bytes of all planes together.
    """
    size = 1 + ENTRY * streams + room
    made = out if out is not None and out.size >= size else np.empty(size, np.uint8)
    made[0] = mode
    return made


class ChunkWriter:
    """A chunk as it grows: a directory, then streams, first as the planes that they hold.

    Each plane lies where its stream begins if nothing before it is coded, so that what is stored need not be moved.
    """

    def __init__(self, mode: int, streams: int, room: int, out: Array | None = None) -> None:
        """`room`: bytes of all planes together. The chunk is made in `out`, if it has as many and the directory's."""
        self._end = 1 + ENTRY * streams
        self.out = begin(mode, streams, room, out)
        self._sizes: list[int] = []
        self._worths: list[float] = []
        self._looks: list[bool] = []

    def plane(self, size: int, effort: CodingLevel, sure: bool = False) -> Array:
        """Room for the plane of the next stream, to be filled before `data` is asked for. `sure`: coding pays."""
        begin, self._end = self._end, self._end + size
        self._sizes.append(size)
        self._worths.append(effort.max_ratio)
        self._looks.append(effort.sampled and not sure)
        return self.out[begin : self._end]

    def add(self, plane: Array, effort: CodingLevel, sure: bool = False) -> None:
        """Append the stream of a plane that lies elsewhere."""
        self.plane(plane.size, effort, sure)[:] = plane

    def data(self, most: int) -> memoryview | None:
        """The chunk, unless it has more than so many bytes."""
        end = lossless.write_streams(self._sizes, self._worths, self._looks, self.out)
        return self.out[:end].data if end <= most else None


def read(data: Bytes, sizes: Sequence[int], scratch: str = "planes") -> list[Array]:
    """The streams of a chunk, which must be of these sizes: views, or this thread's scratch."""
    source, at = np.frombuffer(data, np.uint8), 1 + ENTRY * len(sizes)
    if len(data) < at:
        raise CodecError("a chunk ends in its directory")
    listed = Struct("<" + "BI" * len(sizes)).unpack_from(data, 1)
    kinds, starts = listed[::2], list(accumulate(listed[1::2], initial=at))
    if starts[-1] > len(data):
        raise CodecError("a chunk ends in a stream")
    if starts[-1] < len(data):
        raise CodecError("a chunk goes on past its streams")
    return streams.read(source, kinds, starts, sizes, scratch)


def with_stored_streams(data: Bytes, sizes: Sequence[int]) -> Array:
    """The same chunk with all its streams stored, for kernels that refused it. Raises `CodecError` if it is damaged."""
    directory = b"".join(bytes([STORED]) + size.to_bytes(4, "little") for size in sizes)
    return np.concatenate([np.frombuffer(bytes(data[:1]) + directory, np.uint8), *read(data, sizes)])
