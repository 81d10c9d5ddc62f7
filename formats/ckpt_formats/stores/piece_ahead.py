"""Pieces of files, cached, and fetched before they are needed.

Unlike `read_ahead`, which cuts objects into blocks as it likes, pieces come whole or not at all, since each has a hash.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock

Fetch = Callable[[str, int], memoryview]
"""A piece, by the name of its file and its number. It has the right hash."""

_MAX_NBYTES, _MIN_NBYTES = 64 << 20, 8 << 20
"""Bytes of pieces that are cached, those on their way included: the memory of a process."""
_AHEAD = 2
"""Pieces that are requested after those of a read that goes on where another one has ended."""
_LEAST_AHEAD = 32 << 20
"""With less memory, nothing is requested ahead: of many reads that go on, it would be dropped before it is needed."""
_MAX_STREAMS = 256
"""Reads that may go on, of which the places are noted."""
_REQUESTS = 16
"""Requests at once."""


class PieceAhead:
    """Fetches pieces in threads. Threads may share it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._most, self._nbytes = _MAX_NBYTES, 0
        self._lock = Lock()
        self._pieces: OrderedDict[tuple[str, int], tuple[Future[memoryview], int]] = OrderedDict()
        """Each piece with its size in bytes: those that were needed last come last."""
        self._ends: OrderedDict[tuple[str, int], None] = OrderedDict()
        """Where reads have ended: file and piece."""

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_REQUESTS, "ckpt-pieces")

    def limit(self, nbytes: int) -> None:
        """Cache at most so many bytes."""
        with self._lock:
            self._most = max(_MIN_NBYTES, min(_MAX_NBYTES, nbytes))

    def has(self, name: str, numbers: range) -> bool:
        """Whether these pieces of a file are here, or on their way."""
        with self._lock:
            return all((name, number) in self._pieces for number in numbers)

    def request(
        self, name: str, numbers: range, starts: list[int], *, goes_on: bool = False
    ) -> list["Future[memoryview]"]:
        """Fetch these pieces of a file, and those after them if the reads before go on with them.

        Args:
            name: The file.
            numbers: Of the pieces.
            starts: Where each piece of the file begins, and the last one ends.
            goes_on: Whether more may be read after it, unlike after a header.
        """
        with self._lock:
            before = next((one for one in (numbers[0], numbers[0] - 1) if (name, one) in self._ends), None)
            further = range(0)
            if before is not None:
                del self._ends[name, before]
            if goes_on and before not in (None, numbers[-1]) and self._most >= _LEAST_AHEAD:
                further = range(numbers[-1] + 1, min(numbers[-1] + 1 + _AHEAD, len(starts) - 1))
            self._ends[name, numbers[-1]] = None
            while len(self._ends) > _MAX_STREAMS:
                self._ends.popitem(last=False)
            result = [self._piece(name, number, starts) for number in numbers]
            for number in further:
                self._piece(name, number, starts)
            while self._nbytes > self._most and len(self._pieces) > len(numbers) + len(further):
                self._nbytes -= self._pieces.popitem(last=False)[1][1]
        return result

    def result(self, name: str, number: int, piece: "Future[memoryview]") -> memoryview:
        """A piece, when it is there. Raises what `fetch` raises; the next read asks for it again then."""
        try:
            return piece.result()
        except BaseException:
            with self._lock:
                cached = self._pieces.get((name, number))
                if cached is not None and cached[0] is piece:
                    del self._pieces[name, number]
                    self._nbytes -= cached[1]
            raise

    def _piece(self, name: str, number: int, starts: list[int]) -> "Future[memoryview]":
        cached = self._pieces.get((name, number))
        if cached is not None and cached[0].done() and cached[0].exception() is not None:
            self._nbytes -= self._pieces.pop((name, number))[1]  # when it was fetched ahead; now it may be there
        elif cached is not None:
            self._pieces.move_to_end((name, number))
            return cached[0]
        nbytes = starts[number + 1] - starts[number]
        piece = self._pool.submit(self._fetch, name, number)
        self._pieces[name, number] = piece, nbytes
        self._nbytes += nbytes
        return piece
