"""The leaves of the ranks' trees, told apart by how they were saved, and put together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import Corrupt, Unsupported
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
"""What one rank holds of a tensor. A plain `TensorRef` is a replica: every rank that has it has all of it."""


@dataclass(frozen=True)
class SharedLeaves:
    """What the files of all ranks say again and again; equal ones are kept once."""

    meshes: dict[Mesh, Mesh] = field(default_factory=dict)
    specs: dict[PlacementSpec, PlacementSpec] = field(default_factory=dict)
    tilings: Tilings = field(default_factory=dict)


def leaf_of(value: Value, meshes: MeshCache, world: int, known: SharedLeaves) -> Leaf | None:
    """What a value in the file of one rank says of a tensor; None if it is none."""
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
            raise Unsupported(f"a tensor of class {printable(other)}", where=meshes.where)


def whole(name: str, held: Mapping[int, Leaf]) -> Tensor:
    """The tensor, of what each rank holds of it. Raises `Corrupt` if the ranks contradict each other."""
    kinds = {type(leaf): rank for rank, leaf in held.items()}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise Corrupt(
            f"tensor `{printable(name)}` is a {one.__name__} on rank {first}, but a {other.__name__} on rank {second}",
            hint="Files of several steps or runs may be mixed: copy those of one step again.",
        )
    if dtensors := {rank: leaf for rank, leaf in held.items() if isinstance(leaf, DTensor)}:
        return _gathered(name, dtensors)
    if sharded := {rank: leaf for rank, leaf in held.items() if isinstance(leaf, ShardedTensor)}:
        return sharded_tensor.gather(name, sharded)
    return _copies(name, {rank: tensor_of(leaf) for rank, leaf in held.items() if isinstance(leaf, TensorRef)})


def copies_of(held: Mapping[int, Leaf]) -> list[list[int]]:
    """The ranks that together hold a copy of a tensor, for each copy, in the order in which they cut it."""
    sharded = {rank: leaf for rank, leaf in held.items() if isinstance(leaf, ShardedTensor)}
    if sharded:
        return sharded_tensor.order(sharded)
    specs = {leaf.spec.mesh.ranks: leaf.spec for leaf in held.values() if isinstance(leaf, DTensor)}
    found: dict[tuple[Value, ...], list[int]] = {}
    for ranks, spec in specs.items():
        for rank in ranks:
            found.setdefault((ranks, spec.copy(rank)), []).append(rank)
    return list(found.values())


def _gathered(name: str, held: Mapping[int, DTensor]) -> Tensor:
    """Ranks of different meshes, such as those of the other tensor-parallel ranks, hold copies."""
    meshes: dict[tuple[int, ...], dict[int, DTensor]] = {}
    for rank, leaf in held.items():
        meshes.setdefault(leaf.spec.mesh.ranks, {})[rank] = leaf
    tensors = {ranks[0]: dtensor.gather(name, leaves) for ranks, leaves in meshes.items()}
    return _copies(name, tensors)


def _copies(name: str, tensors: Mapping[int, Tensor]) -> Tensor:
    first = next(iter(tensors.values()))
    for rank, tensor in tensors.items():
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise Corrupt(
                f"`{printable(name)}` should be the same on every rank, but is {first.dtype.name} of "
                f"{list(first.shape)} "
                f"on one and {tensor.dtype.name} of {list(tensor.shape)} on rank {rank}",
                hint="Files of several steps or runs may be mixed: copy those of one step again.",
            )
    copies = [
        copy
        for tensor in tensors.values()
        for copy in (Tensor(tensor.shape, tensor.dtype, tensor.fragments), *tensor.replicas)
    ]
    return with_replicas(copies)
