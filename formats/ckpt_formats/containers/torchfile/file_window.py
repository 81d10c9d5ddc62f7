"""Bytes of a range of a file, by offset. Every read of this package before the tensors' own is one of these."""

import os
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.files import open_to_read, unreadable


class ByteSource(Protocol):
    """Bytes that can be had by offset, wherever they come from."""

    path: Path
    base: int
    length: int

    def at(self, offset: int, nbytes: int) -> bytes: ...
    def corrupt(self, what: str) -> Corrupt: ...


class Window:
    """`length` bytes of a file from `base` on; offsets are counted from `base`.

    So many bytes at either end as `edges` says are read at once, and kept.
    Raises `NotFound` if there is no such regular file, `Corrupt` if it is too
    short for the window or for a read.
    """

    def __init__(self, path: Path, base: int = 0, length: int | None = None, edges: int = 0) -> None:
        self.path, self.base = path, base
        self._head = self._tail = b""
        self._file = open_to_read(path)
        try:
            found = os.fstat(self._file)
            self.length = found.st_size - base if length is None else length
            if base < 0 or self.length < 0 or base + self.length > found.st_size:
                raise Corrupt(
                    f"the file has {found.st_size} bytes, but {self.length} are expected from byte {base} on",
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
        os.close(self._file)

    def at(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes. Nothing is allocated for bytes that are not there."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.length:
            raise self.corrupt(f"bytes {offset} to {offset + nbytes} are needed, but there are {self.length}")
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        if (within := offset - self.length + len(self._tail)) >= 0:
            return self._tail[within : within + nbytes]
        return self._read(offset, nbytes)

    def _read(self, offset: int, nbytes: int) -> bytes:
        pieces, done = [], 0
        try:
            while done < nbytes:
                piece = os.pread(self._file, nbytes - done, self.base + offset + done)
                if not piece:
                    raise self.corrupt(f"the file ended at byte {offset + done} while it was read")
                pieces.append(piece)
                done += len(piece)
        except OSError as error:
            raise unreadable(error, self.path) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def corrupt(self, what: str) -> Corrupt:
        return Corrupt(what, where=self.path)
