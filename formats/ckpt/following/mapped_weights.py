"""The files of a served folder that have its weights, mapped into memory: safetensors, and the chunks of a shard."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np

from ckpt.following.shards import ShardLayout, TensorParallelRank
from ckpt.following.state import State, StateLayout
from ckpt_formats.containers.safetensors import TensorSlot, header_bytes
from ckpt_formats.containers.safetensors_shards import SAFETENSORS_INDEX
from ckpt_formats.containers.shard_index import index_text, numbered_names
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Array

MAX_FILE_NBYTES = 5 * 10**9
"""Bytes of tensors in one file, as `save_pretrained` has it."""
INDEX = f"model{SAFETENSORS_INDEX}"
_CHUNKS = ".chunks"
"""The arrays of a `ShardLayout`, one after another, then the digests of all chunks of the ranks that it needs."""
_ALIGNMENT = 64
"""Bytes: chunks begin at multiples, so that those of any dtype are aligned."""


@dataclass(frozen=True)
class WeightsFile:
    """A file of safetensors, and where each of its tensors begins."""

    name: str
    header: bytes
    slots: tuple[tuple[int, TensorSlot], ...]
    """The number of each tensor in the model."""

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(slot.nbytes for _, slot in self.slots)


@dataclass(frozen=True, eq=False)
class MappedWeights:
    """A folder of weights that is mapped into memory."""

    layout: StateLayout
    files: Sequence[WeightsFile]
    state: State
    shards: Sequence[Array] | None = None
    """Of a tensor-parallel rank: its shards, by the number of the tensor; the state has the chunks. None: all ranks."""
    digests: Array | None = None
    """With `shards`: (16 * chunks,) uint8, those of all chunks of each rank that is needed."""

    def write_shards(self, digests: Sequence[bytes]) -> None:
        """Write what is served of a state that was verified, and the digests by which."""
        if self.shards is None or self.digests is None:
            return
        self.digests[:] = np.frombuffer(b"".join(digests), np.uint8)
        for number, tensor in enumerate(self.layout.tensors):
            self.shards[number][...] = self.layout.values(number, self.state).reshape(-1).view(tensor.dtype)

    def digests_by_rank(self) -> list[bytes] | None:
        """The digests by rank: nothing for a rank that is not needed. None: the layout has all chunks."""
        if self.digests is None:
            return None
        ends = list(accumulate(_digests_nbytes(self.layout, rank) for rank in range(len(self.layout.model.pieces))))
        return [self.digests[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False)]


def weights_files(layout: StateLayout, part: TensorParallelRank) -> list[WeightsFile]:
    """The files of safetensors for what is served: one, or several of at most 5 GB. Raises `UnsupportedError`."""
    groups, nbytes = list[list[int]](), 0
    for number, tensor in enumerate(layout.tensors):
        size = prod(tensor.shape) * tensor.dtype.itemsize
        if not groups or nbytes + size > MAX_FILE_NBYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(number)
        nbytes += size
    names = numbered_names(len(groups or [[]]))
    return [_weights_file(layout, part, name, group) for name, group in zip(names, groups or [[]], strict=True)]


def _weights_file(layout: StateLayout, part: TensorParallelRank, name: str, numbers: Sequence[int]) -> WeightsFile:
    """A file with these tensors, those of the largest elements first: so each of them is aligned."""
    slots, at = list[tuple[int, TensorSlot]](), 0
    for number in sorted(numbers, key=lambda one: -layout.tensors[one].dtype.itemsize):
        tensor = layout.tensors[number]
        slot = TensorSlot(tensor.name, tensor.dtype, tensor.shape, at)
        slots.append((number, slot))
        at += slot.nbytes
    there = {slot.name for _, slot in slots}
    aliases = {alias: name for alias, name in layout.model.aliases.items() if name in there}
    own = {"tensor_parallel": str(part)} if part.ranks > 1 else {}
    header = header_bytes([slot for _, slot in slots], {"format": "pt", **own, **aliases})
    return WeightsFile(name, header, tuple(slots))


def index_of(files: Sequence[WeightsFile]) -> dict[str, bytes]:
    """The index of several files, by its name; nothing for one file."""
    if len(files) == 1:
        return {}
    rows = [(file.name, {slot.name: slot.nbytes for _, slot in file.slots}) for file in files]
    return {INDEX: index_text(rows).encode()}


def map_weights(folder: Path, layout: StateLayout, files: Sequence[WeightsFile], is_new: bool) -> MappedWeights:
    """The weights in files that are mapped; with `is_new`, the files are created, with room for all of them.

    Raises `CorruptError` if a file does not begin as it should, `OSError`.
    """
    shown = dict[int, Array]()
    for file in files:
        path, start = folder / file.name, len(file.header)
        memory = _map_file(path, file.nbytes, is_new)
        if is_new:
            memory[:start] = np.frombuffer(file.header, np.uint8)
        elif memory[:start].tobytes() != file.header:
            raise CorruptError("does not begin with the header of its tensors", where=path)
        for number, slot in file.slots:
            begin = start + slot.offset
            shown[number] = memory[begin : begin + slot.nbytes].view(slot.dtype)
    tensors = [shown[number] for number in range(len(layout.tensors))]
    if not isinstance(layout, ShardLayout):
        return MappedWeights(layout, files, tensors)
    memory, at, chunks = _map_file(folder / _CHUNKS, chunks_nbytes(layout), is_new), 0, list[Array]()
    for size, dtype in layout.arrays():
        chunks.append(memory[at : at + size * dtype.itemsize].view(dtype))
        at += _aligned(size * dtype.itemsize)
    return MappedWeights(layout, files, chunks, tensors, memory[at:])


def _map_file(path: Path, nbytes: int, is_new: bool) -> Array:
    """A file that is mapped: (nbytes,) uint8. Raises `CorruptError` if it has another size."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if is_new else 0)
    descriptor = os.open(path, flags, 0o644)
    try:
        if is_new:
            if nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)  # so that no write into the map can find the disk full
        elif os.fstat(descriptor).st_size != nbytes:
            raise CorruptError("has another size than its tensors", where=path)
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8) if nbytes else np.empty(0, np.uint8)
    finally:
        os.close(descriptor)


def chunks_nbytes(layout: ShardLayout) -> int:
    """The bytes of the file of chunks and digests."""
    values = sum(_aligned(size * dtype.itemsize) for size, dtype in layout.arrays())
    return values + sum(_digests_nbytes(layout, rank) for rank in range(len(layout.model.pieces)))


def _digests_nbytes(layout: StateLayout, rank: int) -> int:
    return 16 * sum(layout.model.chunk_counts(rank)) if layout.chunks(rank) else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
