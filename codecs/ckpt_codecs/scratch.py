"""Memory that each thread uses again and again: fresh memory costs more than the work done in it.

Large arrays are mapped, touched page by page and unmapped under one lock of the process, so that threads which
make them wait for one another, too.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ckpt_codecs.base import Array

_LEAST = 4096
_MOST = 32
"""Buffers that wait for a thread to take them."""


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.named: dict[str, Array] = {}
        self.free: list[Array] = []


_held = _ThreadBuffers()


def thread_buffer(name: str, size: int) -> Array:
    """A buffer of so many bytes, valid until the same thread borrows the same name again."""
    held = _held.named.get(name)
    if held is None or held.size < size:
        held = _held.named[name] = np.empty(max(size, _LEAST), np.uint8)
    return held[:size]


@contextmanager
def temporary_buffer(size: int) -> Iterator[Array]:
    """A buffer of so many bytes that is this thread's alone until the end of the block, in which others may be lent."""
    room = acquire_buffer(size)
    try:
        yield room[:size]
    finally:
        release_buffer(room)


def acquire_buffer(size: int) -> Array:
    """A buffer of at least so many bytes, the least of those that this thread was given back."""
    free = _held.free
    fitting = [i for i, room in enumerate(free) if room.size >= size]
    if fitting:
        return free.pop(min(fitting, key=lambda i: free[i].size))
    if free:
        free.pop(0)  # the new one takes its place
    return np.empty(max(size, _LEAST), np.uint8)


def release_buffer(room: Array) -> None:
    """Give back what was taken, to be used again. Nobody may look at it any more."""
    free = _held.free
    free.append(room)
    if len(free) > _MOST:  # taken by other threads than this
        free.pop(0)
