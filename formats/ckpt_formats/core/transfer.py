"""Read the values of one file's tensors in slabs, within a memory budget; verify and count the bytes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ckpt_codecs.scratch import acquire_buffer, release_buffer
from ckpt_formats.core.files import Reader, write_sealed
from ckpt_formats.core.geometry import Box, slabs
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import Array, Tensor

if TYPE_CHECKING:
    from ckpt_formats.core.spare_workers import SpareWorkers

T = TypeVar("T")

SLAB = 1 << 20
"""Bytes read at once: few enough to stay in a core's cache while they are read, hashed and written.

Linux caches what one call of `write` brings in huge pages if it can, from 2 MiB on. To find and clear these costs it
more than the copy: see benchmarks/results/converting.md.
"""
_SMALL_NBYTES = 1 << 17
"""To write so many bytes takes less time than to let a spare worker read the next ones."""


class Transfer:
    """Reads the tensors of one file. An array that it returns is valid until the next call for the same slot; if it is
    in an item of `ahead`, whoever takes the item may also use it while the next one is computed.
    """

    def __init__(
        self,
        reader: Reader,
        slab_nbytes: int = SLAB,
        count_bytes: Callable[[int], None] = lambda nbytes: None,
        spare: "SpareWorkers | None" = None,
        is_flushed: bool = False,
    ) -> None:
        """`slab_nbytes`: the budget of one array. `count_bytes` is called with the bytes of each block that is read.

        `spare`: workers who may compute the next block of a file; None: nobody does. `is_flushed`: whether the file
        with the values is flushed as soon as it is written.
        """
        self.is_flushed = is_flushed
        self.reader = reader
        self._slab_nbytes = slab_nbytes
        self._count_bytes = count_bytes
        self._buffers: dict[str, Array] = {}
        """The buffer of each slot that was filled last."""
        self._others: dict[str, Array] = {}
        """A second one of each slot that was filled while an item was in use."""
        self._in_use = set[str]()
        """The slots that have not been filled since the item in use was computed."""
        self._spare = spare

    def __enter__(self) -> "Transfer":
        return self

    def __exit__(self, *ignored: object) -> None:
        """Release all buffers. The arrays that were returned are no longer valid."""
        for buffers in (self._buffers, self._others):
            while buffers:
                release_buffer(buffers.popitem()[1])

    def boxes(self, tensor: Tensor) -> Iterator[Box]:
        """Blocks of a tensor, in storage order, each within the budget."""
        return slabs(tensor.shape, max(1, self._slab_nbytes // max(tensor.dtype.itemsize, 4)))

    def slabs(self, tensor: Tensor) -> Iterator[tuple[Box, Array]]:
        """All values of a tensor, in storage order: pairs of a block and its values.

        The values are an array of the same shape as the block, and of the tensor's dtype. They are valid until
        the next block.
        """
        for box in self.boxes(tensor):
            yield box, self.fetch(tensor, box)

    def chunks(self, tensor: Tensor) -> Iterator[memoryview]:
        """All bytes of a tensor, in storage order. Each block is valid until the next one of any tensor."""
        for box in self.boxes(tensor):
            yield as_bytes(self.fetch(tensor, box, "chunks")).data

    def write_sealed(self, folder: Path, file: str, parts: Iterable[bytes | memoryview]) -> Seal:
        """Write a file front to back, as `files.write_sealed`; a spare worker computes the next part meanwhile.

        `parts` may be computed by this transfer, each of blocks that are valid when it is yielded.
        """
        with self.ahead(parts, lambda part: len(part) > _SMALL_NBYTES) as computed:
            return write_sealed(folder, file, computed, self.is_flushed)

    @contextmanager
    def ahead(self, items: Iterable[T], is_worth: Callable[[T], bool]) -> Iterator[Iterator[T]]:
        """As `SpareWorkers.ahead`, for items that this transfer reads: within, nobody else may use it.

        An item may refer to arrays that are valid when it is yielded, so to what each slot had last. Those stay until
        the item after it is taken, since the first fill of a slot goes to the slot's other buffer, and so do all others
        before that.
        """
        if self._spare is None:
            yield iter(items)
            return
        with self._spare.ahead(items, is_worth, self._hold) as computed:
            yield computed

    def _hold(self) -> None:
        """Leave what each slot has now as it is until the next call."""
        self._in_use = set(self._buffers)

    def buffer(self, slot: str, nbytes: int) -> Array:
        """A buffer, (nbytes,) uint8, valid as an array of `fetch` for this slot: for what is computed of arrays."""
        if slot in self._in_use:
            self._in_use.remove(slot)
            buffer, other = self._buffers.pop(slot), self._others.pop(slot, None)
            self._others[slot] = buffer
            if other is not None:
                self._buffers[slot] = other
        if slot not in self._buffers or self._buffers[slot].size < nbytes:
            self._buffers[slot] = acquire_buffer(nbytes)
        return self._buffers[slot][:nbytes]

    def fetch(self, tensor: Tensor, box: Box, slot: str = "values", counted: bool = True) -> Array:
        """The values of one block: an array of the same shape as the block, and of the tensor's dtype.

        It is valid until the next call for the same `slot`. `counted` is false for bytes that are no
        progress of the work: a sample, a base. Raises `CorruptError` if a replica of the tensor has other bits.
        """
        return self._read(tensor if box.shape == tensor.shape else tensor.crop(box), slot, counted)

    def count(self, nbytes: int) -> None:
        """Count bytes of values that need not be read again."""
        self._count_bytes(nbytes)

    def whole(self, tensor: Tensor, slot: str = "values") -> Array:
        """All values of a tensor that is within the budget: (shape) of its dtype. Else like `fetch`."""
        return self._read(tensor, slot, True)

    def _read(self, block: Tensor, slot: str, counted: bool) -> Array:
        out = self.buffer(slot, block.nbytes).view(block.dtype).reshape(block.shape)
        block.read_into(out, self.reader)
        self._count_bytes(block.nbytes if counted else 0)
        return out


def as_bytes(array: Array) -> Array:
    """The bytes of a C-contiguous array, as a vector: (nbytes,) uint8. Shares its memory."""
    return array.reshape(-1).view(np.uint8)
