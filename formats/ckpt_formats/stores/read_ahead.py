"""Ranges of objects, read in blocks that are kept, and requested before they are needed.

To open a checkpoint is many small reads near one another: they share blocks. To read tensors is to read on where the
last read ended: then further blocks are requested meanwhile, several in one request, so that the time until a store
answers is hidden.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

BLOCK = 1 << 20
_MAX_RUN = 8
"""Blocks of one request."""
_MAX_AHEAD = 4
"""Requests for what comes after a read."""
_MAX_BLOCKS = 160
"""Blocks that are kept, and requested: the memory of a process."""
_REQUESTS = 16
"""Requests at once."""
_STEP = 16 * BLOCK
"""Bytes of a long read that are waited for at once."""

Get = Callable[[str, int, int], memoryview]
"""The bytes of an object, by key, offset and number."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks that one request brings, from block `first` on."""

    first: int
    data: "Future[memoryview]"


@dataclass(slots=True)
class _Position:
    """Where the last read of an object ended, and how far has been requested."""

    block: int
    run: int = 1
    """Blocks of the next request: more with each read that goes on where the last one ended."""
    requested: int = 0


class ReadAhead:
    """Reads ranges through `get`. Threads may share it."""

    def __init__(self, get: Get) -> None:
        self._get = get
        self._lock = Lock()
        self._runs: OrderedDict[tuple[str, int], _Run] = OrderedDict()
        self._positions: OrderedDict[str, _Position] = OrderedDict()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_REQUESTS, "ckpt-store")

    def read_into(self, key: str, length: int, offset: int, view: memoryview) -> int:
        """Fill `view` from byte `offset` on of an object of `length` bytes. Returns the bytes that there are."""
        stop = min(offset + len(view), length)
        for begin in range(offset, stop, _STEP):
            end = min(begin + _STEP, stop)
            for number, run in self._requested(key, length, begin, end).items():
                self._copy(key, number, run, begin, end, view[begin - offset : end - offset])
        return max(0, stop - offset)

    def _copy(self, key: str, number: int, run: _Run, begin: int, end: int, view: memoryview) -> None:
        """Copy what a block has of a range."""
        try:
            data = run.data.result()
        except BaseException:
            with self._lock:
                self._runs.pop((key, number), None)  # the next read requests it again
            raise
        start, stop = max(begin, number * BLOCK), min(end, (number + 1) * BLOCK)
        view[start - begin : stop - begin] = data[start - run.first * BLOCK : stop - run.first * BLOCK]

    def _requested(self, key: str, length: int, begin: int, end: int) -> dict[int, _Run]:
        """The blocks of a range, which are requested, and those after it if it goes on where the last read ended."""
        first, last = begin // BLOCK, (end - 1) // BLOCK
        blocks = -(-length // BLOCK)
        with self._lock:
            position = self._positions.pop(key, None) or _Position(-2)
            goes_on = first in (position.block, position.block + 1)
            if goes_on and last > position.block:
                position.run = min(2 * position.run, _MAX_RUN)
            elif not goes_on:
                position.run, position.requested = 1, 0
            position.block = last
            self._positions[key] = position
            while len(self._positions) > _MAX_BLOCKS:
                self._positions.popitem(last=False)
            self._request(key, length, first, last + 1)
            if goes_on and position.run > 1:
                ahead = min(_MAX_AHEAD, max(1, _MAX_BLOCKS // (2 * _MAX_RUN * len(self._positions)))) * position.run
                begin_ahead = max(last + 1, position.requested)
                # In whole runs, so that requests are large.
                if begin_ahead < blocks and begin_ahead - last - 1 <= ahead - position.run:
                    position.requested = min(blocks, last + 1 + ahead)
                    self._request(key, length, begin_ahead, position.requested)
            found = {number: self._runs[key, number] for number in range(first, last + 1)}
            for number in found:
                self._runs.move_to_end((key, number))
            while len(self._runs) > _MAX_BLOCKS:
                self._runs.popitem(last=False)
        return found

    def _request(self, key: str, length: int, first: int, stop: int) -> None:
        """Request those of the blocks that are not there, neighbours together."""
        number = first
        while number < stop:
            if (key, number) in self._runs:
                number += 1
                continue
            end = number + 1
            while end < stop and end - number < _MAX_RUN and (key, end) not in self._runs:
                end += 1
            nbytes = min(end * BLOCK, length) - number * BLOCK
            run = _Run(number, self._pool.submit(self._get, key, number * BLOCK, nbytes))
            self._runs |= {(key, block): run for block in range(number, end)}
            number = end
