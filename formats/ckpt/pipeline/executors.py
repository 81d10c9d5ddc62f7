"""Run tasks on an executor. The interface is `concurrent.futures.Executor`; the default is threads.

NumPy, hashing and file input and output release the interpreter's lock, and
nothing has to be pickled or imported twice. Tasks may run twice and in any
order, so a cluster's executor can take the place of the threads.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import count
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_BATCH_NBYTES = 4 << 20


def run_tasks(executor: Executor, work: Callable[[T], R], items: Iterable[T], in_flight: int) -> Iterator[R]:
    """Apply `work` to every item, at most `in_flight` at a time; results come as they are ready.

    After the first error no more tasks are started; those that run are awaited, then the error is raised: of
    several errors at one time, that of the earliest item.
    """
    waiting = iter(items)
    running: dict[Future[R], int] = {}
    started = count()
    try:
        while True:
            while len(running) < in_flight and (item := next(waiting, _END)) is not _END:
                running[executor.submit(work, item)] = next(started)  # type: ignore[arg-type]
            if not running:
                return
            done = wait(running, return_when=FIRST_COMPLETED).done
            # Results come before the error of another task that ended at the same moment.
            for _, _, future in sorted((_failed(future), running.pop(future), future) for future in done):
                yield future.result()
    finally:
        for future in running:
            future.cancel()
        wait(running)


def batches(items: Iterable[tuple[int, T]]) -> Iterator[list[T]]:
    """Items in their order, joined to tasks of about 4 MiB: a file is opened once for a task, and not for each item.

    Of each item, the bytes that it reads and the item. A task is a list of items, and has at least one.
    """
    batch, total = list[T](), 0
    for nbytes, item in items:
        if batch and total + nbytes > _BATCH_NBYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes
    if batch:
        yield batch


def _failed(future: Future[R]) -> bool:
    return future.exception() is not None


_END = object()
