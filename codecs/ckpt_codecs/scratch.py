"""Buffers that each thread uses again and again: fresh memory costs more than the work done in it."""

import threading

import numpy as np

from ckpt_codecs.base import Array

_local = threading.local()


def borrow(name: str, size: int) -> Array:
    """A buffer of so many bytes, valid until the same thread borrows the same name again."""
    held: Array | None = getattr(_local, name, None)
    if held is None or held.size < size:
        held = np.empty(max(size, 4096), np.uint8)
        setattr(_local, name, held)
    return held[:size]
