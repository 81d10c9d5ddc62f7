"""Let workers that have nothing else to do compute the next block of another worker's file."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from enum import Enum
from threading import Semaphore
from typing import TypeVar

T = TypeVar("T")


class _End(Enum):
    END = 0


_END = _End.END


class SpareWorkers:
    """Workers that wait for the last files of a job. Each takes a place that is free, so no more than all work."""

    def __init__(self, working: Semaphore, pool: Executor) -> None:
        """`working`: the places of all workers. `pool`: threads for those that help."""
        self._working = working
        self._pool = pool

    @contextmanager
    def ahead(
        self, items: Iterable[T], is_worth: Callable[[T], bool], hold: Callable[[], None] = lambda: None
    ) -> Iterator[Iterator[T]]:
        """Give the block the same items. While the block uses one, a spare worker computes the next one, if there is
        such a worker and if the use of the item `is_worth` the handing over, which takes about 50 µs.

        So an item must stay valid while the next one is computed: `hold` is called before that. At most one thread runs
        the iterator at a time.
        """
        rest, coming = iter(items), list[Future[T | _End]]()

        def computed() -> Iterator[T]:
            while True:
                item = coming[0].result() if coming else next(rest, _END)
                coming.clear()
                if item is _END:
                    return
                if is_worth(item) and self._working.acquire(blocking=False):
                    hold()
                    coming.append(self._pool.submit(self._next, rest))
                yield item

        try:
            yield computed()
        finally:
            wait(coming)

    def _next(self, items: Iterator[T]) -> T | _End:
        """Compute the next item at the place that was taken, and leave the place."""
        try:
            return next(items, _END)
        finally:
            self._working.release()
