"""Files that are read by offset, from the disk or from a store."""

import os
from pathlib import Path
from typing import BinaryIO, Protocol

from ckpt_formats.core.store_path import ObjectFile, is_remote


class OpenFile(Protocol):
    """A file, from the disk or from a store, that is read by offset."""

    @property
    def status(self) -> os.stat_result: ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes from `offset` on: none at the end, perhaps fewer before. Raises `OSError`."""

    def read_into(self, offset: int, view: memoryview) -> int:
        """Fill `view` from byte `offset` on. Returns their number, as `read`."""

    def close(self) -> None: ...


class LocalFile:
    """A file of the operating system, by its descriptor."""

    def __init__(self, path: Path) -> None:
        # A pipe would block without O_NONBLOCK.
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))

    @property
    def status(self) -> os.stat_result:
        return os.fstat(self.descriptor)

    def read(self, offset: int, nbytes: int) -> bytes:
        return os.pread(self.descriptor, nbytes, offset)

    def read_into(self, offset: int, view: memoryview) -> int:
        return os.preadv(self.descriptor, [view], offset)

    def close(self) -> None:
        os.close(self.descriptor)


def open_file(path: Path) -> LocalFile | ObjectFile:
    """Open a file to read by offset. Raises `OSError`."""
    return ObjectFile(path) if is_remote(path) else LocalFile(path)


def as_stream(file: LocalFile | ObjectFile) -> BinaryIO:
    """An open file with a position. To close it closes the file."""
    return os.fdopen(file.descriptor, "rb") if isinstance(file, LocalFile) else file.stream()


def stream_nbytes(stream: BinaryIO) -> int:
    """The length of what `as_stream` returns. Its position stays."""
    position = stream.tell()
    nbytes = stream.seek(0, os.SEEK_END)
    stream.seek(position)
    return nbytes
