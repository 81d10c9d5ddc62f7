"""Buffers that each thread uses again, because to map fresh memory costs more than the work in it.

Large arrays are mapped, touched page by page and unmapped under one lock of the process, so threads that allocate them
also wait for each other.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ckpt_codecs.base import Array

MIN_NBYTES = 4096
"""Of a new buffer."""
MAX_FREE = 32
"""Free buffers that a thread retains."""


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, Array] = {}
        self.free: list[Array] = []


_buffers = _ThreadBuffers()


def thread_buffer(name: str, size: int) -> Array:
    """Return a buffer, (size,) uint8: it is valid until the same thread requests the same name again."""
    buffer = _buffers.by_name.get(name)
    if buffer is None or buffer.size < size:
        buffer = _buffers.by_name[name] = np.empty(max(size, MIN_NBYTES), np.uint8)
    return buffer[:size]


@contextmanager
def temporary_buffer(size: int) -> Iterator[Array]:
    """Give the block a buffer, (size,) uint8: it is valid until the end of the block. Blocks may be nested."""
    buffer = acquire_buffer(size)
    try:
        yield buffer[:size]
    finally:
        release_buffer(buffer)


def acquire_buffer(size: int, most: int | None = None) -> Array:
    """Return a buffer, (m,) uint8, m >= size, for any thread to release: the smallest of this thread's that fits.

    `most`: the largest m; None: any.
    """
    free = _buffers.free
    fitting = [i for i, buffer in enumerate(free) if size <= buffer.size and (most is None or buffer.size <= most)]
    if fitting:
        return free.pop(min(fitting, key=lambda i: free[i].size))
    smaller = next((i for i, buffer in enumerate(free) if buffer.size < size), None)
    if smaller is not None:
        free.pop(smaller)  # the new buffer replaces it
    return np.empty(max(size, MIN_NBYTES), np.uint8)


def release_buffer(buffer: Array) -> None:
    """Release a buffer, (m,) uint8, of `acquire_buffer`. Nobody may use it afterwards."""
    free = _buffers.free
    free.append(buffer)
    if len(free) > MAX_FREE:  # another thread acquired it
        free.pop(0)
