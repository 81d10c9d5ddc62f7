"""Ranges of objects, read in blocks that are cached, and requested before they are needed.

A small object comes whole. Of a larger one, a read requests what it needs, in blocks of 64 KiB: most headers fit one,
and a row of a tensor costs no more. Where reads go on, further blocks are requested meanwhile, several in one request,
so that the time until a store answers is hidden: never more than what these reads have passed already.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

WHOLE = 1 << 20
"""Bytes up to which an object is one block: another request costs more."""
BLOCK = 1 << 16
"""Bytes of the blocks of larger objects."""
_MAX_RUN = 8 << 20
"""Bytes of one request."""
_MAX_AHEAD = 32 << 20
"""Bytes that are requested after a read."""
_MAX_NBYTES = 64 << 20
"""Of blocks that are kept, and requested: the memory of a process."""
_MIN_NBYTES = 2 << 20
_MAX_BLOCKS = 1 << 14
"""Blocks that are kept: those of small objects have few bytes."""
_MAX_STREAMS = 64
"""Reads that go on, of which the places are kept."""
_REQUESTS = 16
"""Requests at once."""
_STEP = 16 << 20
"""Bytes of a long read that are waited for at once."""
_NEAR = 1 << 18
"""Bytes between two reads up to which the second one may go on from the first."""
_MANY = 6
"""Reads near one another after which what is between them is requested, too: then requests cost more than bytes."""

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
    """Reads of an object of which each goes on where the last one ended, or near. An object may have several."""

    reads: int = 1
    passed: int = 1
    """Blocks from the first that was read to the last."""
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
                self._copy(key, number, run, _block_size(length), begin, end, view[begin - offset : end - offset])
        return max(0, stop - offset)

    def request(self, key: str, length: int, offset: int, nbytes: int) -> None:
        """Request the blocks of a small range of an object of `length` bytes, and do not wait for them."""
        stop, size = min(offset + nbytes, length, offset + WHOLE), _block_size(length)
        if offset < stop:
            with self._lock:
                self._request(key, length, offset // size, (stop - 1) // size + 1)

    def has(self, key: str, length: int, offset: int, nbytes: int) -> bool:
        """Whether all blocks of a range of an object of `length` bytes are here, or on their way."""
        size = _block_size(length)
        with self._lock:
            blocks = range(offset // size, (offset + nbytes - 1) // size + 1)
            return all(self._is_requested(key, number) for number in blocks)

    def _copy(self, key: str, number: int, run: _Run, size: int, begin: int, end: int, view: memoryview) -> None:
        """Copy what a block of `size` bytes has of a range."""
        try:
            data = run.data.result()
        except BaseException:
            with self._lock:
                if self._runs.get((key, number)) is run:  # the next read requests it again
                    del self._runs[key, number]
                    self._cached_nbytes -= run.share
            raise
        start, stop = max(begin, number * size), min(end, (number + 1) * size)
        view[start - begin : stop - begin] = data[start - run.first * size : stop - run.first * size]

    def _requested(self, key: str, length: int, begin: int, end: int) -> dict[int, _Run]:
        """The blocks of a range, which are requested, and those after it if a stream of reads goes on with it."""
        size = _block_size(length)
        first, last = begin // size, (end - 1) // size
        with self._lock:
            stop = self._ahead(key, -(-length // size), size, first, last)
            if stop is not None and stop - first <= WHOLE // size:  # small: one request brings all
                self._request(key, length, first, stop)
            self._request(key, length, first, last + 1)
            if stop is not None:
                self._request(key, length, last + 1, stop)
            needed = {number: self._runs[key, number] for number in range(first, last + 1)}
            for number in needed:
                self._runs.move_to_end((key, number))
            while self._cached_nbytes > self._most or len(self._runs) > _MAX_BLOCKS:
                self._cached_nbytes -= self._runs.popitem(last=False)[1].share
        return needed

    def _ahead(self, key: str, blocks: int, size: int, first: int, last: int) -> int | None:
        """The block up to which to request more now, after a read of the blocks `first` to `last`; None: nothing."""
        places = range(first, first - max(1, _NEAR // size) - 1, -1)
        before = next((n for n in places if (key, n) in self._streams), None)
        stream = _ReadStream(passed=last + 1 - first) if before is None else self._streams.pop((key, before))
        if last + 1 >= blocks:
            return None
        self._streams[key, last] = stream
        while len(self._streams) > _MAX_STREAMS:
            self._streams.popitem(last=False)
        if before is None or before == last:
            return None  # headers are many small reads of one block
        passed, stream.passed, stream.reads = stream.passed, stream.passed + last - before, stream.reads + 1
        if before < first - 1 and stream.reads < _MANY:
            return None
        active = max(1, sum(one.requested > 0 for one in self._streams.values()))
        ahead = max(1, min(passed, _MAX_AHEAD // size, self._most // size // (2 * active)))
        if stream.requested - last - 1 > ahead // 4:
            return None  # so that requests are large
        stream.requested = min(blocks, last + 1 + ahead)
        return stream.requested

    def _request(self, key: str, length: int, first: int, stop: int) -> None:
        """Request those of the blocks that are not there, neighbours together."""
        number, size = first, _block_size(length)
        while number < stop:
            if self._is_requested(key, number):
                number += 1
                continue
            end = number + 1
            while end < min(stop, number + _MAX_RUN // size) and not self._is_requested(key, end):
                end += 1
            nbytes = min(end * size, length) - number * size
            run = _Run(number, self._pool.submit(self._get, key, number * size, nbytes), -(-nbytes // (end - number)))
            self._runs |= {(key, block): run for block in range(number, end)}
            self._cached_nbytes += run.share * (end - number)
            number = end

    def _is_requested(self, key: str, number: int) -> bool:
        """Whether a block is here, or on its way. One whose request has failed is not: now it may be there."""
        run = self._runs.get((key, number))
        if run is None or not run.data.done() or run.data.exception() is None:
            return run is not None
        del self._runs[key, number]
        self._cached_nbytes -= run.share
        return False


def _block_size(length: int) -> int:
    """The bytes of a block of an object of `length` bytes."""
    return WHOLE if length <= WHOLE else BLOCK
