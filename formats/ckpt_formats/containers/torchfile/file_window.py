"""Bytes of a range of a file, by offset. All reads of this package go through it, except those of tensor data."""

from pathlib import Path
from types import TracebackType
from typing import Protocol

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import open_to_read, unreadable


class ByteSource(Protocol):
    """Bytes that can be read by offset, from any source."""

    path: Path
    base: int
    length: int

    def at(self, offset: int, nbytes: int) -> bytes:
        """The `nbytes` bytes from `offset` on. Raises `CorruptError` if there are fewer."""

    def corrupt(self, message: str) -> CorruptError:
        """An error about this source."""


class Window:
    """`length` bytes of a file from `base` on; offsets are counted from `base`.

    The first and last `edges` bytes are read at once and cached. Raises
    `NotFoundError` if there is no such regular file, `CorruptError` if it is too short
    for the window or for a read.
    """

    def __init__(self, path: Path, base: int = 0, length: int | None = None, edges: int = 0) -> None:
        self.path, self.base = path, base
        self._head = self._tail = b""
        self._file = open_to_read(path)
        try:
            status = self._file.status
            self.length = status.st_size - base if length is None else length
            if base < 0 or self.length < 0 or base + self.length > status.st_size:
                raise CorruptError(
                    f"the file is cut short: {status.st_size:,} bytes, {base + self.length:,} expected or more",
                    where=path,
                    hint="It was truncated, or is still being written: copy it again.",
                )
            if edges:
                self._head = self._read(0, self.length if self.length <= 2 * edges else edges)
                self._tail = self._read(self.length - edges, edges) if self.length > 2 * edges else b""
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. `at` must not be called afterwards."""
        self._file.close()

    def at(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes. Raises `CorruptError`, before it allocates memory, if the window is too short."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.length:
            raise self.corrupt(f"bytes {offset} to {offset + nbytes} are needed, but there are {self.length}")
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        if (tail_offset := offset - self.length + len(self._tail)) >= 0:
            return self._tail[tail_offset : tail_offset + nbytes]
        return self._read(offset, nbytes)

    def _read(self, offset: int, nbytes: int) -> bytes:
        parts, read_nbytes = [], 0
        try:
            while read_nbytes < nbytes:
                part = self._file.read(self.base + offset + read_nbytes, nbytes - read_nbytes)
                if not part:
                    raise self.corrupt(f"the file ended at byte {offset + read_nbytes} while it was read")
                parts.append(part)
                read_nbytes += len(part)
        except OSError as error:
            raise unreadable(error, self.path) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def corrupt(self, message: str) -> CorruptError:
        """An error about this file."""
        return CorruptError(message, where=self.path)
