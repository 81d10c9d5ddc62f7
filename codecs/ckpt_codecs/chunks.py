"""What all codecs of chunks share: the first byte, the directory of streams, and the plain ways to hold a chunk."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from struct import Struct

import numpy as np

from ckpt_codecs import streams
from ckpt_codecs.base import Array, Bytes, DType, Shape
from ckpt_codecs.errors import CodecError
from ckpt_codecs.kinds import ENTRY, RAW, SAME, ZSTD
from ckpt_codecs.streams import Effort
from ckpt_codecs.zstd import expand

LEAST = 16
"""Elements of a chunk that is worth a directory."""
LEAST_FLOATS = 512
"""The same of floats, of whose bits a code saves a fifth at best: norms and biases are held raw."""
MOST = 1 << 28
"""Elements of a chunk that is coded at all; larger ones are held raw, since sizes have 32 bits."""


def words(array: Array) -> Array:
    """The bits of an array as unsigned words, flat; a complex number is two."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(f"f{flat.itemsize // 2}")
    if flat.itemsize > 8:
        return flat.view(np.uint8)
    bits = flat.view(f"u{flat.itemsize}")
    return bits if bits.flags.aligned else bits.copy()


def empty_words(shape: Shape, dtype: DType) -> Array:
    """Room for the words of such an array."""
    word = words(np.empty(0, dtype)).dtype
    return np.empty(prod(shape) * dtype.itemsize // word.itemsize, word)


def raw(array: Array) -> Bytes:
    return bytes([RAW]) + array.tobytes()


def same(array: Array) -> bytes | None:
    """A chunk of one value over and over, if it is one."""
    bits = words(array)
    if not bits.size or bits[0] != bits[-1] or bits[0] != bits[bits.size // 2] or (bits != bits[0]).any():
        return None
    return bytes([SAME]) + bits[:1].tobytes()


def plain(data: Bytes, shape: Shape, dtype: DType) -> Array | None:
    """A chunk that is held in a way that every codec knows; None if this one is not."""
    size = prod(shape)
    if not data:
        raise CodecError("a chunk has at least one byte")
    if data[0] == RAW:
        if len(data) - 1 != size * dtype.itemsize:
            raise CodecError(f"{len(data) - 1} raw bytes are not {size} values of {dtype}")
        return np.frombuffer(data, np.uint8, offset=1).copy().view(dtype).reshape(shape)
    if data[0] == SAME:
        made = empty_words(shape, dtype)
        value = np.frombuffer(data[1:], np.uint8)
        if value.size != made.itemsize:
            raise CodecError(f"{value.size} bytes are not one value of {dtype}")
        made[:] = value.view(made.dtype)
        return made.view(dtype).reshape(shape)
    if data[0] == ZSTD:
        held = expand(np.frombuffer(data, np.uint8, offset=1), size * dtype.itemsize)
        return np.frombuffer(held, np.uint8).copy().view(dtype).reshape(shape)
    return None


class Writer:
    """A chunk as it grows: a directory, then streams, first as the planes that they hold.

    Each plane lies where its stream begins if nothing before it is coded, so that what is stored need not be moved.
    """

    def __init__(self, mode: int, streams: int, room: int) -> None:
        """`room`: bytes of all planes together."""
        self._start = self._end = 1 + ENTRY * streams
        # Not this thread's scratch: it becomes the chunk itself.
        self._out = np.empty(self._start + room, np.uint8)
        self._out[0] = mode
        self._sizes: list[int] = []
        self._worths: list[float] = []
        self._looks: list[bool] = []

    def plane(self, size: int, effort: Effort, sure: bool = False) -> Array:
        """Room for the plane of the next stream, to be filled before `data` is asked for. `sure`: coding pays."""
        begin, self._end = self._end, self._end + size
        self._sizes.append(size)
        self._worths.append(effort.worth)
        self._looks.append(effort.survey and not sure)
        return self._out[begin : self._end]

    def add(self, plane: Array, effort: Effort, sure: bool = False) -> None:
        """Append the stream of a plane that lies elsewhere."""
        self.plane(plane.size, effort, sure)[:] = plane

    def data(self, most: int) -> memoryview | None:
        """The chunk, unless it has more than so many bytes."""
        end = streams.write(self._out, self._start, self._sizes, self._worths, self._looks)
        return self._out[:end].data if end <= most else None


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
