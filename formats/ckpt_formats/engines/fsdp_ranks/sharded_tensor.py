"""Read `ShardedTensor`s: those of FSDP1's sharded state dicts, and the flat parameters of its local state dicts.

They are saved with the state `(local shards, metadata, process group, sharding spec, init_rrefs)`.
Every rank lists the blocks of all ranks, so the lists are compared.

Source: torch.distributed._shard.sharded_tensor, api.py and metadata.py, 2.4 to 2.13.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Fragment, Tensor, from_fragments, with_replicas
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Record, Value
from ckpt_formats.engines.fsdp_ranks.lookups import attribute, numbers

_MIXED = "Files of several steps or runs may be mixed: copy those of one step again."


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """One rank's shards of a tensor, and its list of the blocks of all ranks."""

    shape: Shape
    dtype: Global
    boxes: tuple[Box, ...]
    """The blocks of all ranks of the process group."""
    shards: tuple[tuple[Box, TensorRef], ...]
    """This rank's blocks with their values."""
    local_rank: int
    """The rank in its process group."""
    copies: int
    """The number of process groups. Each has a copy of the tensor."""


Tilings = dict[tuple[Box, ...], tuple[Box, ...]]
"""Each list of blocks by itself: the files of all ranks have equal lists, so that one object is enough."""


def sharded_of(record: Record, rank: int, world: int, where: Path, known: Tilings) -> ShardedTensor:
    """The ShardedTensor that was saved as this record in the file of `rank` of `world`. Raises `CorruptError`."""
    state = record.args[3]
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], list):
        raise CorruptError("a ShardedTensor does not have the form in which PyTorch saves it", where=where)
    saved, metadata, group = state[:3]
    shape = numbers(attribute(metadata, "size", tuple, where), "the shape of a ShardedTensor", where)
    boxes = tuple(_box(one, shape, where) for one in attribute(metadata, "shards_metadata", list, where))
    properties = attribute(metadata, "tensor_properties", Record, where).state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, Global):
        raise CorruptError("a ShardedTensor does not state its type", where=where)
    shards = tuple(_shard(one, shape, dtype, where) for one in saved)
    keys = ("local_rank", "global_rank", "local_world_size", "global_world_size")
    local_rank, global_rank, group_size, group_world = (attribute(group, key, int, where) for key in keys)
    if (global_rank, group_world) != (rank, world):
        raise CorruptError(
            f"was written by rank {global_rank} of {group_world}, but its name is that of rank {rank} of {world}",
            where=where,
            hint="Was the file renamed, or is it from another run? Copy the files of all ranks of one step again.",
        )
    if not 0 <= local_rank < group_size or world % group_size:
        raise CorruptError(
            f"rank {rank} is number {local_rank} of a process group of {group_size} among {world} ranks", where=where
        )
    for box, _ in shards:
        if box not in boxes:
            raise CorruptError(f"rank {rank} holds block {box} of a tensor, but lists others: {boxes[:4]}", where=where)
    return ShardedTensor(shape, dtype, known.setdefault(boxes, boxes), shards, local_rank, world // group_size)


def ranks_of_copies(leaves: Mapping[int, ShardedTensor]) -> list[list[int]]:
    """For each copy of the tensor: the ranks of its process group, in order.

    Raises `CorruptError` if some are missing.
    """
    copies = next(iter(leaves.values())).copies
    by_local_rank: dict[int, list[int]] = {}
    for rank, leaf in sorted(leaves.items()):
        by_local_rank.setdefault(leaf.local_rank, []).append(rank)
    if any(len(ranks) != copies for ranks in by_local_rank.values()):
        raise CorruptError(f"ranks {sorted(leaves)} cannot be {copies} process groups of one size", hint=_MIXED)
    return [[by_local_rank[local_rank][i] for local_rank in sorted(by_local_rank)] for i in range(copies)]


def gather(name: str, leaves: Mapping[int, ShardedTensor]) -> Tensor:
    """The complete tensor from the shards of all ranks.

    Process groups have copies, which are compared when they are read. Raises `CorruptError` if ranks contradict each
    other, or if a block is missing.
    """
    first = next(iter(leaves.values()))
    holders: dict[Box, list[TensorRef]] = {box: [] for box in first.boxes if box.size}
    for rank, leaf in leaves.items():
        if (leaf.shape, leaf.dtype, leaf.boxes, leaf.copies) != (first.shape, first.dtype, first.boxes, first.copies):
            raise CorruptError(
                f"tensor `{printable(name)}`: rank {rank} has other blocks, another shape or another type than the "
                f"ranks before it: {list(leaf.shape)} in {len(leaf.boxes)} blocks instead of {list(first.shape)} in "
                f"{len(first.boxes)}",
                hint=_MIXED,
            )
        for box, ref in leaf.shards:
            if box.size:
                holders[box].append(ref)
    for box, refs in holders.items():
        if len(refs) != first.copies:
            raise CorruptError(
                f"tensor `{printable(name)}`: block {box} of {list(first.shape)} is held by {len(refs)} ranks, "
                f"not by {first.copies}",
                hint=_MIXED,
            )
    dtype = next((ref.dtype for refs in holders.values() for ref in refs), None)
    dtype = dtype or next(ref.dtype for leaf in leaves.values() for _, ref in leaf.shards)
    copies = [
        [Fragment(box, tensor_of(refs[i]).fragments[0].blob) for box, refs in holders.items()]
        for i in range(first.copies)
    ]
    return with_replicas([from_fragments(first.shape, fragments, dtype) for fragments in copies])


def _box(metadata: Value, shape: Shape, where: Path) -> Box:
    offsets = numbers(attribute(metadata, "shard_offsets", list, where), "the offsets of a shard", where)
    sizes = numbers(attribute(metadata, "shard_sizes", list, where), "the sizes of a shard", where)
    if not len(offsets) == len(sizes) == len(shape):
        raise CorruptError(
            f"a shard at {list(offsets)} of {list(sizes)} in a tensor of shape {list(shape)}", where=where
        )
    return Box(offsets, tuple(a + n for a, n in zip(offsets, sizes, strict=True)))


def _shard(shard: Value, shape: Shape, dtype: Global, where: Path) -> tuple[Box, TensorRef]:
    ref = attribute(shard, "tensor", TensorRef, where)
    box = _box(attribute(shard, "metadata", Record, where), shape, where)
    if ref.shape != box.shape or dtype != Global("torch", ref.dtype.name):
        raise CorruptError(
            f"a shard for block {box} of {dtype} holds {ref.dtype.name} of shape {list(ref.shape)}", where=where
        )
    return box, ref
