"""Ranges of objects in stores, requested before they are read.

A plan names all ranges that will be read, about in the order in which they are read. Those that lie near one another
are joined to requests of several MiB, and a few requests are always on their way. So the time until a store answers is
hidden, and a request is not paid for each tensor. What a plan does not name, or names wrongly, is read all the same: by
requests of its own.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from ckpt_formats.core.coming_reads import ObjectRange
from ckpt_formats.core.store_path import StorePath

_GAP = 1 << 20
"""Bytes between two ranges that are requested, too, if what is before them has as many: another request costs more."""
_SMALL_GAP = 1 << 18
"""Bytes between two ranges that are requested in any case: they take less time than another request."""
_MAX_REQUEST = 8 << 20
_MIN_REQUEST = 1 << 18
_MAX_RANGES = 1 << 14
"""Ranges that are joined at once."""
_REQUESTS = 16
"""Requests at once."""
_MAX_IDLE = 8
"""Bytes that are read, in units of the memory, until what nobody reads is given up."""
_MAX_JOINED = 8
"""Bytes, in units of the memory, up to which a range that is read is looked for in what the plan names next."""
_MAX_UNUSED = 2
"""Bytes given up, in units of the memory, after which the plan is not believed if they are also a quarter of all."""


@dataclass(slots=True, eq=False)
class _RangeRequest:
    """A range that is requested at once."""

    reads: "PlannedReads"
    number: int
    """Its place among the requests of these reads."""
    path: StorePath
    start: int
    stop: int
    unread: int
    """Bytes that the plan names and nobody has read."""
    data: "Future[memoryview] | None" = None
    is_touched: bool = False
    is_forgotten: bool = False
    last_use: int = 0
    """How many bytes were read in all when it was requested, or read the last time."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class _Place:
    """How far is requested from a place of reading on."""

    stop: int
    """The number of the first request that was not looked at."""
    nbytes: int = 0
    """About how many bytes were requested before it, and not touched."""


@dataclass(slots=True, eq=False)
class PlannedReads:
    """What one piece of work will read: a file that is written, or several in step. Threads may share it."""

    prefetch: "Prefetch"
    batches: "Iterator[list[_Joined]]"
    requests: list[_RangeRequest | None] = field(default_factory=list)
    """Those that were joined so far; None: read, or given up."""
    nbytes: list[int] = field(default_factory=list)
    """Of each request."""
    places: "dict[int, _Place]" = field(default_factory=lambda: {-1: _Place(0)})
    """Places of reading, by the number of the request that is being read there, or was read last; -1: the beginning."""
    unsent_nbytes: int = 0
    """Of requests that were joined and not sent."""

    def read_into(self, path: StorePath, offset: int, view: memoryview) -> int | None:
        """Fill the beginning of `view` from byte `offset` of an object on. Returns how many bytes were requested ahead.

        None if this byte was not: the plan does not name it, or it was read before. Raises what `Store.get` raises.
        """
        return self.prefetch.read_into(self, path, offset, view)

    def __enter__(self) -> "PlannedReads":
        return self

    def __exit__(self, *ignored: object) -> None:
        """Give up what was not read."""
        self.prefetch.end(self)


class Prefetch:
    """The memory and the requests that several `PlannedReads` share."""

    def __init__(self, plan: Sequence[Iterable[ObjectRange]], nbytes: int, readers: int) -> None:
        """`plan`: of each piece of work, in their order, what it will read, about in the order of reading.

        `nbytes`: of memory. `readers`: how many threads read at once.
        """
        self._nbytes = nbytes
        self.reads = [PlannedReads(self, _batches(ranges, nbytes, readers)) for ranges in plan]
        self._waiting = dict.fromkeys(self.reads)
        self._active: dict[PlannedReads, None] = {}
        self._by_object: dict[StorePath, tuple[list[int], list[_RangeRequest]]] = {}
        """By object: where its requests begin, and the requests, none of which overlap."""
        self._fetched: OrderedDict[_RangeRequest, None] = OrderedDict()
        """Those in memory or on their way, the one that was not used for longest first."""
        self._on_their_way: list[Future[memoryview]] = []
        self._fetched_nbytes = self._read_nbytes = self._unused_nbytes = 0
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(_REQUESTS, "ckpt-prefetch")

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *ignored: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def read_into(self, reads: PlannedReads, path: StorePath, offset: int, view: memoryview) -> int | None:
        """See `PlannedReads.read_into`."""
        with self._lock:
            request = self._find(reads, path, offset)
            if request is None:
                return None
            data = self._use(request)
        try:
            values = data.result()
        except BaseException:
            with self._lock:
                self._forget(request)
            raise
        nbytes = min(request.stop - offset, len(view))
        view[:nbytes] = values[offset - request.start : offset - request.start + nbytes]
        with self._lock:
            self._read_nbytes += nbytes
            request.unread -= nbytes
            request.last_use = self._read_nbytes
            if request.unread <= 0:
                self._forget(request)
                self._look_ahead()
        return nbytes

    def end(self, reads: PlannedReads) -> None:
        """Give up what was not read."""
        with self._lock:
            self._waiting.pop(reads, None)
            self._active.pop(reads, None)
            reads.batches = iter(())
            for request in filter(None, reads.requests):
                self._forget(request)
            reads.requests.clear()
            reads.places.clear()
            self._look_ahead()

    def _find(self, reads: PlannedReads, path: StorePath, offset: int) -> _RangeRequest | None:
        """The request with this byte, if the plan names it not too far ahead."""
        while True:
            starts, requests = self._by_object.get(path, ((), ()))
            place = bisect_right(starts, offset) - 1
            if place >= 0 and offset < requests[place].stop:
                return requests[place]
            if reads.unsent_nbytes > _MAX_JOINED * self._nbytes or not self._join_next(reads):
                return None

    def _use(self, request: _RangeRequest) -> "Future[memoryview]":
        data = request.data or self._send(request)
        self._fetched.move_to_end(request)
        if not request.is_touched:
            request.is_touched = True
            reads = request.reads
            self._waiting.pop(reads, None)
            self._active[reads] = None
            self._move(reads, request.number)
            self._look_ahead()
        return data

    def _move(self, reads: PlannedReads, number: int) -> None:
        """Go on to a request: from the place before it, if all that was requested there is read."""
        ended = [n for n in reads.places if n < number and (n < 0 or reads.requests[n] is None)]
        last = max(ended, default=None)
        before = _Place(0) if last is None else reads.places[last]
        for one in ended:
            del reads.places[one]
        if last is None or before.stop <= number:
            reads.places[number] = _Place(number + 1)
        else:
            passed = sum(reads.nbytes[last + 1 : number + 1])
            reads.places[number] = _Place(before.stop, max(0, before.nbytes - passed))

    def _look_ahead(self) -> None:
        """Request what comes next, as far as there is memory: for each place of reading its share."""
        self._give_up_unused()
        if self._unused_nbytes > max(_MAX_UNUSED * self._nbytes, (self._read_nbytes + self._unused_nbytes) // 4):
            return
        self._on_their_way = [one for one in self._on_their_way if not one.done()]
        share = self._nbytes // max(1, sum(len(reads.places) for reads in self._active))
        for reads in self._active:
            for place in reads.places.values():
                if not self._extend(reads, place, share):
                    return
                spare = share - place.nbytes
                for other in self._waiting:  # the work that comes next
                    if spare <= 0:
                        break
                    if not self._extend(other, other.places[-1], spare):
                        return
                    spare -= other.places[-1].nbytes

    def _extend(self, reads: PlannedReads, place: _Place, nbytes: int) -> bool:
        """Request so many bytes from a place of reading on; False if no request can be made now."""
        while place.nbytes < nbytes and (place.stop < len(reads.requests) or self._join_next(reads)):
            request = reads.requests[place.stop]
            if request is not None and not request.is_touched:
                if request.data is None:
                    too_many = len(self._on_their_way) >= 2 * _REQUESTS
                    if too_many or self._fetched_nbytes + request.nbytes > self._nbytes:
                        return False
                    self._send(request)
                place.nbytes += request.nbytes
            place.stop += 1
        return True

    def _send(self, request: _RangeRequest) -> "Future[memoryview]":
        path = request.path
        request.data = data = self._pool.submit(path.store.get, path.key, request.start, request.nbytes)
        request.last_use = self._read_nbytes
        request.reads.unsent_nbytes -= request.nbytes
        self._on_their_way.append(data)
        self._fetched[request] = None
        self._fetched_nbytes += request.nbytes
        return data

    def _give_up_unused(self) -> None:
        while self._fetched:
            request = next(iter(self._fetched))
            if request.last_use + _MAX_IDLE * self._nbytes > self._read_nbytes:
                return
            self._unused_nbytes += request.unread
            request.reads.places.pop(request.number, None)
            self._forget(request)

    def _forget(self, request: _RangeRequest) -> None:
        """Free its memory. It may be forgotten already, by another thread."""
        if request.is_forgotten:
            return
        request.is_forgotten = True
        request.reads.requests[request.number] = None
        if request.data is None:
            request.reads.unsent_nbytes -= request.nbytes
        else:
            del self._fetched[request]
            self._fetched_nbytes -= request.nbytes
        starts, requests = self._by_object[request.path]
        place = bisect_right(starts, request.start) - 1
        del starts[place], requests[place]

    def _join_next(self, reads: PlannedReads) -> bool:
        """Add the next requests; False if there are none any more."""
        known = len(reads.requests)
        while len(reads.requests) == known:
            batch = next(reads.batches, None)
            if batch is None:
                return False
            self._add(reads, batch)
        return True

    def _add(self, reads: PlannedReads, batch: "list[_Joined]") -> None:
        """Add requests for what no other one covers, and what the store does not keep: of small objects, it has all."""
        for one in batch:
            if one.path.store.has(one.path.key, one.start, one.stop - one.start):
                continue
            starts, requests = self._by_object.setdefault(one.path, ([], []))
            before = max(0, bisect_right(starts, one.start) - 1)
            for start, stop in _uncovered(requests[before:], one.start, one.stop):
                unread = min(one.named, stop - start)
                request = _RangeRequest(reads, len(reads.requests), one.path, start, stop, unread)
                reads.requests.append(request)
                reads.nbytes.append(request.nbytes)
                reads.unsent_nbytes += request.nbytes
                place = bisect_right(starts, start)
                starts.insert(place, start)
                requests.insert(place, request)


def _uncovered(requests: Iterable[_RangeRequest], start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of a range that no request covers. `requests`: sorted, from the last before the range on."""
    parts = []
    for request in requests:
        if request.start >= stop:
            break
        if request.stop > start:
            if start < request.start:
                parts.append((start, request.start))
            start = request.stop
    return [*parts, (start, stop)] if start < stop else parts


def joined_ranges(ranges: Iterable[ObjectRange], nbytes: int, readers: int) -> Iterator[ObjectRange]:
    """The requests that a `Prefetch` makes for these ranges, if no other one has a part of them."""
    for batch in _batches(ranges, nbytes, readers):
        for one in batch:
            yield ObjectRange(one.path, one.start, one.stop)


@dataclass(slots=True)
class _Joined:
    """Ranges that lie near one another."""

    path: StorePath
    start: int
    stop: int
    named: int
    """Bytes that are in the ranges, and not between them."""
    use: int
    """When it is read first, among those of the batch."""


def _batches(ranges: Iterable[ObjectRange], nbytes: int, readers: int) -> Iterator[list[_Joined]]:
    """Neighbours joined, in batches: two batches of each reader have `nbytes` bytes of memory.

    Those of a batch are in the order in which they are first read.
    """
    batch, largest = max(1, nbytes // (2 * readers)), max(_MIN_REQUEST, min(_MAX_REQUEST, nbytes // 8))
    some, total = list[ObjectRange](), 0
    for one in ranges:
        for start in range(one.start, one.stop, batch):
            some.append(ObjectRange(one.path, start, min(start + batch, one.stop)))
            total += some[-1].stop - start
            if total >= batch or len(some) >= _MAX_RANGES:
                yield _join(some, largest)
                some, total = [], 0
    if some:
        yield _join(some, largest)


def _join(ranges: list[ObjectRange], largest: int) -> list[_Joined]:
    merged = list[_Joined]()
    for use in sorted(range(len(ranges)), key=lambda use: (str(ranges[use].path), ranges[use].start)):
        one = ranges[use]
        last = merged[-1] if merged and merged[-1].path == one.path else None
        start = one.start if last is None else max(one.start, last.stop)
        while start < one.stop:
            if last is None or start > last.stop + _gap(last) or start >= last.start + largest:
                last = _Joined(one.path, start, start, 0, use)
                merged.append(last)
            stop = min(one.stop, last.start + largest)
            last.named += stop - start
            last.stop, last.use = stop, min(last.use, use)
            start = stop
    return sorted(merged, key=lambda joined: joined.use)


def _gap(last: _Joined) -> int:
    """The bytes after some joined ranges up to which the next range is joined, too: at least half of all is read."""
    return min(_GAP, max(_SMALL_GAP, last.named))
