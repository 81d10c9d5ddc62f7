"""The file of a pack while it is written: front to back, its header last, into space that is kept for it."""

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import xxhash

from ckpt_codecs.base import Bytes
from ckpt_formats.core.files import write_at
from ckpt_formats.core.publish import EarlyFlush
from ckpt_formats.universal.entry import ALIGNMENT, CodedChunks, Extent

_BUFFER = 1 << 18
"""Small states are collected in a buffer of so many bytes, so that each needs no call of the system."""


@dataclass(frozen=True)
class Mark:
    """How far a pack was written."""

    position: int


class PackFile:
    """A pack that grows. Its bytes are not hashed here: each chunk has its own checksum, in the index."""

    def __init__(self, path: Path, number: int, header_nbytes: int, is_flushed: bool = False) -> None:
        """`is_flushed`: whether the pack is flushed as soon as it is written, so that the disk may begin with it."""
        self.number = number
        self.header_nbytes = header_nbytes
        self._out = self._open(path)
        self._early = EarlyFlush(path, self._out.fileno(), header_nbytes) if is_flushed else None
        self._out.seek(header_nbytes)
        self.position = header_nbytes
        """Where the next bytes will be."""

    @staticmethod
    def _open(path: Path) -> BinaryIO:
        return path.open("w+b", buffering=_BUFFER)

    def __enter__(self) -> "PackFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._out.close()

    def write(self, data: Bytes) -> None:
        """Write at the end."""
        self._out.write(data)
        self.position += len(data)
        if self._early is not None:
            self._early.note(self.position)

    def since(self, start: int) -> Extent:
        """The range from byte `start` to the end."""
        return Extent(self.number, start, self.position - start)

    def mark(self) -> "Mark":
        """The end of the pack now, for `rollback`."""
        return Mark(self.position)

    def rollback(self, mark: "Mark") -> None:
        """Remove what was written after a mark."""
        self._out.flush()
        self.position = mark.position
        self._out.truncate(self.position)
        self._out.seek(self.position)

    def reserve(self, nbytes: int) -> Extent:
        """A range at the end that `write_at` fills."""
        extent = Extent(self.number, self.position, nbytes)
        self.position += nbytes
        self._out.seek(self.position)
        return extent

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write into a range that was reserved."""
        self._out.flush()
        write_at(self._out.fileno(), data, offset)

    def finish(self, header: bytes) -> None:
        """Write the header."""
        assert len(header) == self.header_nbytes, "the header is longer than the space for it"
        self.write_at(memoryview(header), 0)


class PlacedStates(PackFile):
    """States at their place in a single file, of which others write other parts; the header is written by nobody here.

    `place`: the range that they must fill exactly.
    """

    def __init__(self, path: Path, place: Extent) -> None:
        super().__init__(path, place.pack, place.offset)
        self._early = EarlyFlush(path, self._out.fileno(), place.offset, is_shared=True)
        self._end = place.offset + place.nbytes

    @staticmethod
    def _open(path: Path) -> BinaryIO:
        return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=_BUFFER)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        assert kind is not None or self.position == self._end, "the states do not have the length that was planned"


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
