"""Rows of a file from which several readers take different columns: a band of them is read once, for all readers.

A rank that has columns of a matrix needs a short run of bytes of each row; other ranks need the rest of the row. So
the files of these ranks are written in step. A reader that needs rows outside the band waits until every other reader
needs other rows, too, or has left. Then the band moves: at that moment nobody uses it, so one buffer is enough.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from ckpt_formats.core.files import Seal

BAND = 1 << 22
"""Bytes of a band: few enough to stay in a core's cache, and many enough that there are few reads."""

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of bytes in a file: all of one length, each `stride` bytes after the one before."""

    path: Path
    offset: int
    """Where the first run begins."""
    run: int
    stride: int
    count: int
    seal: "Seal | None"
    """The checksum of a range of the file that holds all of them."""

    def within(self, nbytes: int) -> int:
        """How many runs, from the first one on, are complete in the bytes from `offset` to `offset + nbytes`."""
        return min(self.count, (nbytes - self.run) // self.stride + 1) if self.stride else self.count


class FileReader(Protocol):
    """What a band is read with: a `Reader`."""

    def read_into(self, path: Path, offset: int, out: memoryview, seal: "Seal | None" = None) -> None:
        """Fill `out` with the bytes of a file from `offset` on."""

    def file_nbytes(self, path: Path) -> int:
        """The length of a file."""


@dataclass(eq=False, slots=True)
class _Request:
    rows: Rows
    reader: FileReader
    is_answered: bool = False
    error: BaseException | None = None


class Band:
    """The part of a file that all its readers are at. Each reader belongs to one thread."""

    def __init__(
        self,
        readers: int = 1,
        nbytes: int = BAND,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """A band of `nbytes` bytes, or of one run if that is longer, for so many readers.

        A thread waits for other readers inside the context `waiting()`, which may let another thread work meanwhile.
        """
        self.readers = readers
        self._present = readers
        self._nbytes = nbytes
        self._while_waiting = waiting
        self._changed = Condition()
        self._requests: list[_Request] = []
        """Those that wait, in the order in which they came."""
        self._path: Path | None = None
        self._start = 0
        self._bytes: _Bytes = np.empty(0, np.uint8)
        self._buffer = self._bytes

    def rows(self, rows: Rows, reader: FileReader) -> _Bytes:
        """The bytes from `rows.offset` on, (nbytes,) uint8: of at least one run (see `Rows.within`).

        They are valid until the same thread calls this method again, or `leave`. Raises what reading raises.
        """
        request = _Request(rows, reader)
        with self._changed:
            request.is_answered = self._has(rows)
            if not request.is_answered:
                self._requests.append(request)
                self._move_if_all_wait()
        if not request.is_answered:
            with self._while_waiting(), self._changed:
                self._changed.wait_for(lambda: request.is_answered)
        if request.error is not None:
            raise request.error
        return self._bytes[rows.offset - self._start :]

    def leave(self) -> None:
        """Say that one of the readers will ask for nothing more."""
        with self._changed:
            self._present -= 1
            self._move_if_all_wait()

    def _has(self, rows: Rows) -> bool:
        end = self._start + self._bytes.size
        return self._path == rows.path and self._start <= rows.offset and rows.offset + rows.run <= end

    def _move_if_all_wait(self) -> None:
        if not self._requests or len(self._requests) < self._present:
            return
        first = self._first()
        try:
            self._read(first)
        except BaseException as error:
            first.error, self._path = error, None
        for request in self._requests:
            request.is_answered = request is first or self._has(request.rows)
        self._requests = [request for request in self._requests if not request.is_answered]
        self._changed.notify_all()

    def _first(self) -> _Request:
        """Of those that ask for the same rows as the one that waits longest, the one whose columns come first."""
        oldest = self._requests[0]
        start = oldest.rows.offset - oldest.rows.stride + 1
        alike = (one for one in self._requests if one.rows.path == oldest.rows.path)
        within = (one for one in alike if start <= one.rows.offset <= oldest.rows.offset)
        return min(within, key=lambda one: one.rows.offset, default=oldest)

    def _read(self, request: _Request) -> None:
        """Whole rows if there are several readers, else what lies between the first run and the end of the last."""
        rows, reader = request.rows, request.reader
        count = max(1, rows.within(self._nbytes))
        nbytes = (count - 1) * rows.stride + rows.run
        whole_rows = min(rows.count, self._nbytes // rows.stride) * rows.stride if rows.stride else 0
        if self.readers > 1 and whole_rows:
            end = reader.file_nbytes(rows.path) if rows.seal is None else rows.seal.offset + rows.seal.nbytes
            nbytes = max(min(whole_rows, end - rows.offset), rows.run)
        if self._buffer.size < nbytes:
            self._buffer = np.empty(max(nbytes, min(self._nbytes, rows.count * rows.stride)), np.uint8)
        self._path, self._start, self._bytes = rows.path, rows.offset, self._buffer[:nbytes]
        reader.read_into(rows.path, rows.offset, self._bytes.data, rows.seal)
