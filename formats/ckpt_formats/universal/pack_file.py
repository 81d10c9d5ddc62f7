"""The file of a pack while it is written: front to back, its header last, into space that is kept for it."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from ckpt_codecs.base import Bytes
from ckpt_formats.universal.entry import ALIGNMENT, CodedChunks, Extent

_BLOCK = 1 << 22
_BUFFER = 1 << 18
"""Small states are collected in a buffer of so many bytes, so that each needs no call of the system."""


@dataclass(frozen=True)
class Mark:
    """How far a pack was written."""

    position: int
    hash: xxhash.xxh3_128
    in_order: bool


class PackFile:
    """A pack that grows. Its bytes are hashed as they are written."""

    def __init__(self, path: Path, number: int, header_nbytes: int) -> None:
        self.number = number
        self.header_nbytes = header_nbytes
        self._out = path.open("w+b", buffering=_BUFFER)
        self._out.seek(header_nbytes)
        self._hash = xxhash.xxh3_128()
        self.position = header_nbytes
        """Where the next bytes will be."""
        self._in_order = True

    def __enter__(self) -> "PackFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._out.close()

    def write(self, data: Bytes) -> None:
        """Write at the end."""
        self._out.write(data)
        self._hash.update(data)
        self.position += len(data)

    def since(self, start: int) -> Extent:
        """The range from byte `start` to the end."""
        return Extent(self.number, start, self.position - start)

    def mark(self) -> "Mark":
        """The end of the pack now, for `rollback`."""
        return Mark(self.position, self._hash.copy(), self._in_order)

    def rollback(self, mark: "Mark") -> None:
        """Remove what was written after a mark."""
        self._out.flush()
        self.position, self._hash, self._in_order = mark.position, mark.hash.copy(), mark.in_order
        self._out.truncate(self.position)
        self._out.seek(self.position)

    def reserve(self, nbytes: int) -> Extent:
        """A range at the end that `write_at` fills."""
        extent = Extent(self.number, self.position, nbytes)
        self.position += nbytes
        self._out.seek(self.position)
        self._in_order = False
        return extent

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write into a range that was reserved."""
        self._out.flush()
        while data:
            done = os.pwrite(self._out.fileno(), data, offset)
            data, offset = data[done:], offset + done

    def finish(self, header: bytes) -> int:
        """Write the header. Returns the XXH3-128 of all bytes behind it."""
        assert len(header) == self.header_nbytes, "the header is longer than the space for it"
        self.write_at(memoryview(header), 0)
        if self.position == self.header_nbytes or self._in_order:
            return int(self._hash.intdigest())
        result = xxhash.xxh3_128()
        for block in _blocks(self._out.fileno(), self.header_nbytes, self.position):
            result.update(block)
        return int(result.intdigest())


class ChunkAppender:
    """Encoded chunks at the end of a pack, one after another."""

    def __init__(self, out: PackFile) -> None:
        self._out = out
        self._begin = out.position
        self._nbytes: list[int] = []
        self._stored: list[int] = []
        self._last = xxhash.xxh3_64()

    def add(self, data: Bytes) -> None:
        """Write the next chunk."""
        self._out.write(data)
        self._nbytes.append(len(data))
        self._last.reset()
        self._last.update(data)
        self._stored.append(self._last.intdigest())

    def end(self) -> tuple[Extent, CodedChunks]:
        """Fill with zeros. Returns the range of all chunks, and their rows in the index."""
        filling = bytes(-(self._out.position - self._begin) % ALIGNMENT)
        if filling:
            self._out.write(filling)
            self._last.update(filling)
            self._stored[-1] = self._last.intdigest()
        extent = Extent(self._out.number, self._begin, self._out.position - self._begin)
        return extent, CodedChunks(np.array(self._nbytes, np.uint32), np.array(self._stored, np.uint64))


def _blocks(file: int, start: int, stop: int) -> Iterable[bytes]:
    for at in range(start, stop, _BLOCK):
        yield os.pread(file, min(_BLOCK, stop - at), at)
