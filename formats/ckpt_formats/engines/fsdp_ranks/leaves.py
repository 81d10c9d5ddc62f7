"""The tensors in the trees of the ranks: recognise the form in which they were saved, and merge them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.tensor import Tensor, with_replicas
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks import dtensor, sharded_tensor
from ckpt_formats.engines.fsdp_ranks.dtensor import DTensor, MeshCache, dtensor_of
from ckpt_formats.engines.fsdp_ranks.lookups import class_of, subclass
from ckpt_formats.engines.fsdp_ranks.mesh import Mesh
from ckpt_formats.engines.fsdp_ranks.placement import PlacementSpec
from ckpt_formats.engines.fsdp_ranks.sharded_tensor import ShardedTensor, Tilings, sharded_of

Leaf: TypeAlias = TensorRef | DTensor | ShardedTensor
"""One rank's part of a tensor. A plain `TensorRef` is a replica: the rank has the complete tensor."""


@dataclass(frozen=True)
class SharedLeaves:
    """Descriptions that the files of all ranks repeat. Equal ones are one object, each stored by itself."""

    meshes: dict[Mesh, Mesh] = field(default_factory=dict)
    specs: dict[PlacementSpec, PlacementSpec] = field(default_factory=dict)
    tilings: Tilings = field(default_factory=dict)


def leaf_of(value: Value, meshes: MeshCache, world: int, known: SharedLeaves) -> Leaf | None:
    """The leaf that a value in the file of one rank is; None if it is no tensor.

    Raises `CorruptError` or `UnsupportedError`.
    """
    if isinstance(value, TensorRef):
        return value
    record = subclass(value)
    if record is None:
        return None
    match class_of(record):
        case "DTensor":
            return dtensor_of(record, meshes)
        case "ShardedTensor":
            return sharded_of(record, meshes.rank, world, meshes.where, known.tilings)
        case other:
            raise UnsupportedError(f"a tensor of class {printable(other)}", where=meshes.where)


def merge_leaves(name: str, leaves: Mapping[int, Leaf]) -> Tensor:
    """The complete tensor from the leaves of all ranks. Raises `CorruptError` if the ranks contradict each other."""
    kinds = {type(leaf): rank for rank, leaf in leaves.items()}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise CorruptError(
            f"tensor `{printable(name)}` is a {one.__name__} on rank {first}, but a {other.__name__} on rank {second}",
            hint="Files of several steps or runs may be mixed: copy those of one step again.",
        )
    if dtensors := {rank: leaf for rank, leaf in leaves.items() if isinstance(leaf, DTensor)}:
        return _gathered(name, dtensors)
    if sharded := {rank: leaf for rank, leaf in leaves.items() if isinstance(leaf, ShardedTensor)}:
        return sharded_tensor.gather(name, sharded)
    return _copies(name, {rank: tensor_of(leaf) for rank, leaf in leaves.items() if isinstance(leaf, TensorRef)})


def copies_of(leaves: Mapping[int, Leaf]) -> list[list[int]]:
    """For each copy of a tensor: the ranks that together hold it, in the order of their parts."""
    sharded = {rank: leaf for rank, leaf in leaves.items() if isinstance(leaf, ShardedTensor)}
    if sharded:
        return sharded_tensor.ranks_of_copies(sharded)
    specs = {leaf.spec.mesh.ranks: leaf.spec for leaf in leaves.values() if isinstance(leaf, DTensor)}
    copies: dict[tuple[Value, ...], list[int]] = {}
    for ranks, spec in specs.items():
        for rank in ranks:
            copies.setdefault((ranks, spec.copy(rank)), []).append(rank)
    return list(copies.values())


def _gathered(name: str, leaves: Mapping[int, DTensor]) -> Tensor:
    """The complete tensor from DTensors. Ranks of different meshes hold copies, for example with tensor parallelism."""
    meshes: dict[tuple[int, ...], dict[int, DTensor]] = {}
    for rank, leaf in leaves.items():
        meshes.setdefault(leaf.spec.mesh.ranks, {})[rank] = leaf
    tensors = {ranks[0]: dtensor.gather(name, leaves) for ranks, leaves in meshes.items()}
    return _copies(name, tensors)


def _copies(name: str, tensors: Mapping[int, Tensor]) -> Tensor:
    first = next(iter(tensors.values()))
    for rank, tensor in tensors.items():
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise CorruptError(
                f"`{printable(name)}` should be the same on every rank, but is {first.dtype.name} of "
                f"{list(first.shape)} on one and {tensor.dtype.name} of {list(tensor.shape)} on rank {rank}",
                hint="Files of several steps or runs may be mixed: copy those of one step again.",
            )
    copies = [
        copy
        for tensor in tensors.values()
        for copy in (Tensor(tensor.shape, tensor.dtype, tensor.fragments), *tensor.replicas)
    ]
    return with_replicas(copies)
