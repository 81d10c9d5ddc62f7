"""Bytes of a range of a file, by offset. Every read of this package before the tensors' own is one of these."""

import os
import stat
from pathlib import Path
from types import TracebackType

from ckpt_formats.errors import Corrupt, NotFound
from ckpt_formats.files import unreadable


class Window:
    """`length` bytes of a file from `base` on; offsets are counted from `base`.

    Raises `NotFound` if there is no such regular file, `Corrupt` if it is too
    short for the window or for a read.
    """

    def __init__(self, path: Path, base: int = 0, length: int | None = None) -> None:
        self.path, self.base = path, base
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for somebody to write to it.
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise unreadable(error, path) from error
        except ValueError as error:
            raise NotFound("no file can have this name: it holds a NUL character") from error
        try:
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode):
                raise NotFound("is not a regular file", where=path)
            self.length = found.st_size - base if length is None else length
            if base < 0 or self.length < 0 or base + self.length > found.st_size:
                raise Corrupt(
                    f"the file has {found.st_size} bytes, but {self.length} are expected from byte {base} on",
                    where=path,
                    hint="It was truncated, or is still being written: copy it again.",
                )
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
