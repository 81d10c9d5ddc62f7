"""A ring buffer in shared memory: the trainer fills slots, the writer empties them.

The memory is a memfd. It has no name, so nothing remains of it after both processes end.
(`multiprocessing.shared_memory` removes memory that other processes still use: CPython #82300.)
"""

import mmap
import os
import weakref

import numpy as np

from ckpt_codecs.base import Array

_PAGE = 4096


class Ring:
    """`slots` slots of at least `nbytes` bytes each."""

    def __init__(self, nbytes: int, slots: int, file: int | None = None) -> None:
        """`file`: the descriptor of a ring that another process created with the same sizes; None: create a ring."""
        self.slot_nbytes = -(-max(nbytes, 1) // _PAGE) * _PAGE
        self.slots = slots
        self.file = os.memfd_create("ckpt-ring", os.MFD_CLOEXEC) if file is None else file
        if file is None:
            os.ftruncate(self.file, self.slot_nbytes * slots)
            weakref.finalize(self, os.close, self.file)  # the memory stays as long as it is open
        self.memory = mmap.mmap(self.file, self.slot_nbytes * slots)
        self._bytes = np.frombuffer(self.memory, np.uint8)

    @property
    def content(self) -> Array:
        """The bytes of all slots, one after the other: (n,) uint8."""
        return self._bytes

    def slot(self, index: int) -> Array:
        """The bytes of a slot: (slot_nbytes,) uint8, shared with the other process."""
        return self._bytes[index * self.slot_nbytes : (index + 1) * self.slot_nbytes]
