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
_MAX_NBYTES = 64 * BLOCK
"""Of blocks that are kept, and requested: the memory of a process."""
_MIN_NBYTES = 2 * BLOCK
_MAX_BLOCKS = 1 << 14
"""Blocks that are kept: those of small objects have few bytes."""
_MAX_STREAMS = 64
"""Reads that go on, of which the places are kept."""
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
    share: int
    """Bytes of each of its blocks; a little more of the last one of an object."""


@dataclass(slots=True)
class _ReadStream:
    """Reads of an object of which each goes on where the last one ended. An object may have several at once."""

    run: int = 1
    """Blocks of the next request: more with each read."""
    requested: int = 0
    """The block up to which all is requested."""


class ReadAhead:
    """Reads ranges through `get`. Threads may share it."""

    def __init__(self, get: Get) -> None:
        self._get = get
        self._most, self._cached_nbytes = _MAX_NBYTES, 0
        self._lock = Lock()
        self._runs: OrderedDict[tuple[str, int], _Run] = OrderedDict()
        self._streams: OrderedDict[tuple[str, int], _ReadStream] = OrderedDict()
        """By object and the last block that was read."""

    def keep(self, nbytes: int) -> None:
        """Keep at most so many bytes of blocks, those on their way included."""
        with self._lock:
            self._most = max(_MIN_NBYTES, min(_MAX_NBYTES, nbytes))

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

    def request(self, key: str, length: int, offset: int, nbytes: int) -> None:
        """Request the blocks of a small range of an object of `length` bytes, and do not wait for them."""
        stop = min(offset + nbytes, length, offset + BLOCK)
        if offset < stop:
            with self._lock:
                self._request(key, length, offset // BLOCK, (stop - 1) // BLOCK + 1)

    def has(self, key: str, offset: int, nbytes: int) -> bool:
        """Whether all blocks of a range are here, or on their way."""
        with self._lock:
            blocks = range(offset // BLOCK, (offset + nbytes - 1) // BLOCK + 1)
            return all((key, number) in self._runs for number in blocks)

    def _copy(self, key: str, number: int, run: _Run, begin: int, end: int, view: memoryview) -> None:
        """Copy what a block has of a range."""
        try:
            data = run.data.result()
        except BaseException:
            with self._lock:
                if self._runs.pop((key, number), None) is not None:  # the next read requests it again
                    self._cached_nbytes -= run.share
            raise
        start, stop = max(begin, number * BLOCK), min(end, (number + 1) * BLOCK)
        view[start - begin : stop - begin] = data[start - run.first * BLOCK : stop - run.first * BLOCK]

    def _requested(self, key: str, length: int, begin: int, end: int) -> dict[int, _Run]:
        """The blocks of a range, which are requested, and those after it if a stream of reads goes on with it."""
        first, last = begin // BLOCK, (end - 1) // BLOCK
        with self._lock:
            self._request(key, length, first, last + 1)
            stop = self._ahead(key, -(-length // BLOCK), first, last)
            if stop is not None:
                self._request(key, length, last + 1, stop)
            needed = {number: self._runs[key, number] for number in range(first, last + 1)}
            for number in needed:
                self._runs.move_to_end((key, number))
            while self._cached_nbytes > self._most or len(self._runs) > _MAX_BLOCKS:
                self._cached_nbytes -= self._runs.popitem(last=False)[1].share
        return needed

    def _ahead(self, key: str, blocks: int, first: int, last: int) -> int | None:
        """The block up to which to request more now, after a read of the blocks `first` to `last`; None: nothing."""
        before = next((n for n in (first, first - 1) if (key, n) in self._streams), None)
        stream = _ReadStream() if before is None else self._streams.pop((key, before))
        if last + 1 >= blocks:
            return None
        self._streams[key, last] = stream
        while len(self._streams) > _MAX_STREAMS:
            self._streams.popitem(last=False)
        if before is None or before == last:
            return None  # headers are many small reads of one block
        active = max(1, sum(one.run > 1 for one in self._streams.values()))
        stream.run = max(1, min(2 * stream.run, _MAX_RUN, self._most // BLOCK // (4 * active)))
        ahead = stream.run * max(1, min(_MAX_AHEAD, self._most // BLOCK // (2 * stream.run * active)))
        if stream.requested - last - 1 > ahead - stream.run:
            return None  # in whole runs, so that requests are large
        stream.requested = min(blocks, last + 1 + ahead)
        return stream.requested

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
            run = _Run(number, self._pool.submit(self._get, key, number * BLOCK, nbytes), -(-nbytes // (end - number)))
            self._runs |= {(key, block): run for block in range(number, end)}
            self._cached_nbytes += run.share * (end - number)
            number = end
