"""What all codecs of chunks share: the first byte, the directory of streams, and the plain ways to hold a chunk."""

from collections.abc import Sequence
from math import prod
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, DType, Shape
from ckpt_codecs.errors import CodecError
from ckpt_codecs.kinds import RAW, SAME, STORED, ZSTD
from ckpt_codecs.scratch import borrow
from ckpt_codecs.streams import Effort, decode, encode
from ckpt_codecs.zstd import expand

_ENTRY = Struct("<BI")
ENTRY = _ENTRY.size
"""Bytes of the directory for each stream: its kind, and its size in 4 bytes."""
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


def raw(array: Array) -> bytes:
    return bytes([RAW]) + array.tobytes()


def same(array: Array) -> bytes | None:
    """A chunk of one value over and over, if it is one."""
    bits = words(array)
    if not bits.size or bits[0] != bits[-1] or bits[0] != bits[bits.size // 2] or (bits != bits[0]).any():
        return None
    return bytes([SAME]) + bits[:1].tobytes()


def plain(data: bytes, shape: Shape, dtype: DType) -> Array | None:
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
    """A chunk as it grows: a directory, then streams. Planes that lie in place already are not moved."""

    def __init__(self, mode: int, streams: int, room: int) -> None:
        self._start = self._at = 1 + ENTRY * streams
        self._out = borrow("chunk", self._start + room + 8)
        self._directory = bytearray([mode])

    def place(self, i: int, size: int) -> Array:
        """Where the i-th stream lies if it and all before it are stored, each with `size` bytes."""
        return self._out[self._start + i * size : self._start + (i + 1) * size]

    def add(self, plane: Array, effort: Effort, sure: bool = False) -> None:
        """Append a stream."""
        kind, held = encode(plane, self._out, self._at, effort, sure)
        if kind == STORED:
            self._out[self._at : self._at + held] = plane
        self._list(kind, held)

    def add_placed(self, i: int, size: int, effort: Effort) -> None:
        """Append the stream that lies in the i-th place."""
        plane, spare = self.place(i, size), borrow("spare", size + 8)
        kind, held = encode(plane, spare, 0, effort)
        if kind != STORED:
            self._out[self._at : self._at + held] = spare[:held]
        elif self._at != self._start + i * size:
            self._out[self._at : self._at + held] = plane
        self._list(kind, held)

    def _list(self, kind: int, held: int) -> None:
        self._directory += _ENTRY.pack(kind, held)
        self._at += held

    def data(self, most: int) -> bytes | None:
        """The chunk, unless it has more than so many bytes."""
        if self._at > most:
            return None
        self._out[: self._start] = self._directory
        return self._out[: self._at].tobytes()


def read(data: bytes, sizes: Sequence[int], names: Sequence[str]) -> list[Array]:
    """The streams of a chunk, which must be of these sizes: views, or this thread's scratch of these names."""
    source = np.frombuffer(data, np.uint8)
    at = 1 + ENTRY * len(sizes)
    if len(data) < at:
        raise CodecError("a chunk ends in its directory")
    planes = []
    for i, (size, name) in enumerate(zip(sizes, names, strict=True)):
        kind, held = _ENTRY.unpack_from(data, 1 + ENTRY * i)
        end = at + held
        if end > len(data):
            raise CodecError("a chunk ends in a stream")
        planes.append(decode(kind, source, at, end, size, name))
        at = end
    if at != len(data):
        raise CodecError("a chunk goes on past its streams")
    return planes
