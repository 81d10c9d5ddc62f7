"""Rows of a file from which several readers take different columns: a band of them is read once, for all readers.

A rank that has columns of a matrix needs a short run of bytes of each row; other ranks need the rest of the row. So
the files of these ranks are written in step. A reader that needs rows outside the band waits until every other reader
needs other rows, too, or has left. Then the band moves: at that moment nobody uses it, so one buffer is enough.
"""

from collections import Counter
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, get_ident
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from ckpt_formats.core.evidence import Evidence
    from ckpt_formats.core.seals import Seal

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

    @property
    def span(self) -> int:
        """Number of bytes from the first run to the end of the last."""
        return (self.count - 1) * self.stride + self.run

    def within(self, nbytes: int) -> int:
        """How many runs, from the first one on, are complete in the bytes from `offset` to `offset + nbytes`."""
        return min(self.count, (nbytes - self.run) // self.stride + 1) if self.stride else self.count


class FileReader(Protocol):
    """What a band is read with: a `Reader`."""

    def read_into(self, path: Path, offset: int, out: memoryview, seal: "Seal | None" = None) -> None:
        """Fill `out` with the bytes of a file from `offset` on."""

    def file_nbytes(self, path: Path) -> int:
        """The length of a file."""

    def evidence(self, of: "Container[Seal] | None" = None) -> "Evidence":
        """The checksums of what was read under these seals."""


class BytesInMemory:
    """A range of one file that is in memory."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._start = 0
        self._bytes: _Bytes = np.empty(0, np.uint8)
        self._buffer = self._bytes

    def has(self, rows: Rows) -> bool:
        """Is the first run in it?"""
        end = self._start + self._bytes.size
        return self._path == rows.path and self._start <= rows.offset and rows.offset + rows.run <= end

    def at(self, offset: int) -> _Bytes:
        """Its bytes from `offset` of the file on: (nbytes,) uint8. They are valid until it moves."""
        return self._bytes[offset - self._start :]

    def move(self, rows: Rows, nbytes: int, reader: FileReader) -> None:
        """Read so many bytes from the first run on. Raises what reading raises; then there is nothing."""
        self._path = None
        if self._buffer.size < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        self._start, self._bytes = rows.offset, self._buffer[:nbytes]
        reader.read_into(rows.path, rows.offset, self._bytes.data, rows.seal)
        self._path = rows.path


def rows_nbytes(rows: Rows, most: int) -> int:
    """How many bytes to read for one reader: those of as many runs as `most` bytes hold, at least of one."""
    count = max(1, rows.within(most))
    return (count - 1) * rows.stride + rows.run


def band_nbytes(rows: Rows, most: int, end: int) -> int:
    """How many bytes to read for several readers, who need all columns: whole rows, but nothing from `end` on."""
    whole = min(rows.count, most // rows.stride) * rows.stride if rows.stride else 0
    return max(min(whole, end - rows.offset), rows.run) if whole else rows_nbytes(rows, most)


@dataclass(eq=False, slots=True)
class _Request:
    rows: Rows
    thread: int
    is_answered: bool = False
    error: BaseException | None = None


class Band:
    """The part of a file that all its readers are at. Each of them belongs to one thread."""

    def __init__(
        self,
        reader: FileReader,
        sharers: int,
        nbytes: int = BAND,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """A band of `nbytes` bytes, or of one run if that is longer, that `sharers` readers share.

        It is read with `reader`, by one thread at a time, so that the checksums of what is read are computed once. A
        thread waits for others inside the context `waiting()`, which may let another thread work meanwhile.
        """
        self.sharers = sharers
        self._present = sharers
        self._reader = reader
        self._nbytes = nbytes
        self._while_waiting = waiting
        self._changed = Condition()
        self._requests: list[_Request] = []
        self._answered: Counter[int] = Counter()
        """How often each thread was answered."""
        self._in_memory = BytesInMemory()

    def rows(self, rows: Rows) -> _Bytes:
        """The bytes from `rows.offset` on, (nbytes,) uint8: of at least one run (see `Rows.within`).

        They are valid until the same thread calls this method again, or `leave`. Raises what reading raises.
        """
        request = _Request(rows, get_ident())
        with self._changed:
            request.is_answered = self._in_memory.has(rows)
            if not request.is_answered:
                self._requests.append(request)
                self._move_if_all_wait()
        if not request.is_answered:
            with self._while_waiting(), self._changed:
                self._changed.wait_for(lambda: request.is_answered)
        if request.error is not None:
            raise request.error
        return self._in_memory.at(rows.offset)

    def leave(self) -> None:
        """Say that one of the readers will ask for nothing more."""
        with self._changed:
            self._present -= 1
            self._move_if_all_wait()

    def evidence(self, seals: "Container[Seal]") -> "Evidence":
        """The checksums of what was read under these seals, for whichever reader."""
        with self._changed:
            return self._reader.evidence(seals)

    def _move_if_all_wait(self) -> None:
        if not self._requests or len(self._requests) < self._present:
            return
        first = self._first()
        try:
            self._in_memory.move(first.rows, self._nbytes_of(first.rows), self._reader)
        except BaseException as error:
            first.error = error
        for request in self._requests:
            request.is_answered = request is first or self._in_memory.has(request.rows)
            self._answered[request.thread] += request.is_answered
        self._requests = [request for request in self._requests if not request.is_answered]
        self._changed.notify_all()

    def _first(self) -> _Request:
        """The request with the lowest columns of the rows that most threads ask for.

        Every file has its tensors in one order. So all who need the tensor that comes first are at it: they are the
        most, and share it. Where each needs several files, a thread that was answered fewer times goes before others.
        """
        requests = iter(sorted(self._requests, key=lambda one: (one.rows.path, one.rows.offset)))
        alike = [[next(requests)]]
        for request in requests:
            rows = alike[-1][0].rows
            if request.rows.path == rows.path and request.rows.offset - rows.offset < max(rows.stride, 1):
                alike[-1].append(request)
            else:
                alike.append([request])
        return max(alike, key=lambda ones: (len(ones), -min(self._answered[one.thread] for one in ones)))[0]

    def _nbytes_of(self, rows: Rows) -> int:
        if self._present == 1:  # nobody needs the other columns any more
            return rows_nbytes(rows, self._nbytes)
        seal = rows.seal
        end = self._reader.file_nbytes(rows.path) if seal is None else seal.offset + seal.nbytes
        return band_nbytes(rows, self._nbytes, end)
