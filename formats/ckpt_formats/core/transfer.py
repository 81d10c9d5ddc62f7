"""How the values of one part move: in slabs within a memory budget, checked and counted."""

from collections.abc import Callable, Iterator

import numpy as np

from ckpt_codecs.scratch import acquire_buffer, release_buffer
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, slabs
from ckpt_formats.core.tensor import Array, Tensor

SLAB = 4 << 20
"""Bytes read at once: small enough to stay in a core's cache between reading, hashing and writing."""


class Transfer:
    """Reads the tensors of one part. Arrays it hands out are valid until the next call."""

    def __init__(
        self, reader: Reader, slab_nbytes: int = SLAB, moved: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self.reader = reader
        self._slab = slab_nbytes
        self._moved = moved
        self._scratch: dict[str, Array] = {}

    def __enter__(self) -> "Transfer":
        return self

    def __exit__(self, *ignored: object) -> None:
        """Leave the memory of all arrays that were handed out to the next one of this thread."""
        while self._scratch:
            release_buffer(self._scratch.popitem()[1])

    def boxes(self, tensor: Tensor) -> Iterator[Box]:
        """Blocks of a tensor, in storage order, each within the budget."""
        return slabs(tensor.shape, max(1, self._slab // max(tensor.dtype.itemsize, 4)))

    def slabs(self, tensor: Tensor) -> Iterator[tuple[Box, Array]]:
        """All values of a tensor, in storage order."""
        for box in self.boxes(tensor):
            yield box, self.fetch(tensor, box)

    def chunks(self, tensor: Tensor) -> Iterator[memoryview]:
        """All bytes of a tensor, in storage order."""
        for _, values in self.slabs(tensor):
            yield as_bytes(values).data

    def fetch(self, tensor: Tensor, box: Box, slot: str = "values", counted: bool = True) -> Array:
        """The values of one block. Arrays of different slots do not disturb each other.

        `counted` is false for what is read beside the work: a sample, a base.
        Raises `Corrupt` if a replica of the tensor holds other bits.
        """
        block = tensor.crop(box)
        buffer = self._scratch.get(slot)
        if buffer is None or buffer.size < block.nbytes:
            buffer = self._scratch[slot] = acquire_buffer(block.nbytes)
        out = buffer[: block.nbytes].view(block.dtype).reshape(block.shape)
        block.read_into(out, self.reader)
        self._moved(block.nbytes if counted else 0)
        return out


def as_bytes(array: Array) -> Array:
    """The bytes of a packed array, as a vector."""
    return array.reshape(-1).view(np.uint8)
