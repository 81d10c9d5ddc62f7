"""Read `DTensor`s: one rank's block of a tensor, and a description of the blocks of all ranks.

They are saved as `_rebuild_wrapper_subclass(DTensor, dtype, shape, ...)` with the state
`{_local_tensor, _spec: DTensorSpec{mesh, placements, tensor_meta, shard_order}}`.

Source: torch.distributed.tensor, _dtensor_spec.py, placement_types.py and _utils.py, 2.4 to 2.13.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.claims import MAX_NUMBER
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Fragment, Tensor, from_fragments, with_replicas
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Record, Value
from ckpt_formats.engines.fsdp_ranks.lookups import attribute, numbers, parts
from ckpt_formats.engines.fsdp_ranks.mesh import Mesh, mesh_of
from ckpt_formats.engines.fsdp_ranks.placement import (
    Placement,
    PlacementSpec,
    RankBlock,
    block_of_rank,
    without_strides,
)


@dataclass(frozen=True, slots=True)
class DTensor:
    """One rank's block of a tensor, and the placements of the tensor on the mesh."""

    spec: PlacementSpec
    shard: TensorRef


@dataclass(frozen=True)
class MeshCache:
    """The meshes of one rank's file. Many tensors share one mesh, which is decoded once."""

    rank: int
    where: Path
    meshes: dict[Mesh, Mesh]
    """Each mesh by itself, shared with the files of other ranks: equal meshes are one object, compared by identity."""
    specs: dict[PlacementSpec, PlacementSpec]
    """The same for specs."""
    _decoded: dict[int, tuple[Value, Mesh]] = field(default_factory=dict)

    def of(self, record: Value) -> Mesh:
        """The mesh that was saved as this record. Raises `CorruptError`."""
        if id(record) not in self._decoded:
            mesh = mesh_of(record, self.rank, self.where)
            self._decoded[id(record)] = record, self.meshes.setdefault(mesh, mesh)
        return self._decoded[id(record)][1]


def dtensor_of(record: Record, meshes: MeshCache) -> DTensor:
    """The DTensor that was saved as this record. Raises `CorruptError` or `UnsupportedError`."""
    where, arguments = meshes.where, record.args[2]
    state = {key: value for part in parts(record.args[3]) for key, value in part.items()}
    spec, shard = state.get("_spec"), state.get("_local_tensor")
    if not isinstance(shard, TensorRef):
        kind = shard.args[1] if isinstance(shard, Record) and len(shard.args) > 1 else type(shard).__name__
        raise UnsupportedError(f"a DTensor whose local tensor is a {kind}", where=where)
    if not isinstance(spec, Record) or not isinstance(arguments, tuple) or len(arguments) < 3:
        raise CorruptError("a DTensor does not state how it is distributed", where=where)
    shape = numbers(arguments[2], "the shape of a DTensor", where)
    meta = spec.get("tensor_meta")
    if isinstance(meta, Record) and meta.args and numbers(meta.args[0], "the shape of a DTensor", where) != shape:
        raise CorruptError(f"a DTensor has the shapes {list(shape)} and {list(meta.args[0])}", where=where)
    if arguments[1] != Global("torch", shard.dtype.name):
        raise CorruptError(f"a DTensor of {arguments[1]} has a tensor of {shard.dtype.name} inside", where=where)
    mesh = meshes.of(spec.get("mesh"))
    listed = attribute(spec, "placements", tuple, where)
    if len(listed) != len(mesh.shape):
        raise CorruptError(f"{len(listed)} placements on a mesh of {len(mesh.shape)} dimensions", where=where)
    placements = tuple(_placement(one, shape, where) for one in listed)
    full_spec = PlacementSpec(shape, mesh, placements, _order(spec.get("shard_order"), placements, where))
    return DTensor(meshes.specs.setdefault(full_spec, full_spec), shard)


def gather(name: str, leaves: Mapping[int, DTensor]) -> Tensor:
    """The complete tensor from the blocks of all ranks of its mesh. `leaves` are by rank.

    Ranks that differ only along replicated dimensions have copies, which are
    compared when they are read. Raises `CorruptError` if a rank is missing or contradicts the others.
    """
    first = next(iter(leaves.values()))
    spec, dtype = first.spec, first.shard.dtype
    for rank in spec.mesh.ranks:
        if rank not in leaves:
            raise CorruptError(
                f"tensor `{printable(name)}` is spread over {spec.mesh}, but rank {rank} lacks it",
                hint="Files of several steps or runs may be mixed: copy those of one step again.",
            )
        if leaves[rank].spec != spec or leaves[rank].shard.dtype != dtype:
            raise CorruptError(
                f"tensor `{printable(name)}` is {dtype.name}, {spec} on one rank, "
                f"but {leaves[rank].shard.dtype.name}, {leaves[rank].spec} on rank {rank}",
                hint="Files of several steps or runs may be mixed: copy those of one step again.",
            )
    blocks = _rank_blocks(name, spec, {rank: leaves[rank].shard.shape for rank in spec.mesh.ranks})
    copies: dict[Shape, list[Fragment]] = {}
    for rank, block in blocks.items():
        (fragment,) = tensor_of(leaves[rank].shard).fragments
        fragments = copies.setdefault(spec.copy(rank), [])
        fragments += (Fragment(placed.full, fragment.blob.crop(placed.shard)) for placed in block.blocks())
    return with_replicas([from_fragments(spec.shape, blocks_of_copy, dtype) for blocks_of_copy in copies.values()])


def _rank_blocks(name: str, spec: PlacementSpec, shapes: Mapping[int, Shape]) -> dict[int, RankBlock]:
    """The block of each rank. A strided spec has two meanings; the one that fits the ranks' shapes is taken."""
    plain = without_strides(spec) if any(placement.factor > 1 for placement in spec.placements) else None
    fitting: list[dict[int, RankBlock]] = []
    for variant in (spec, plain):
        if variant is not None:
            blocks = {rank: block_of_rank(variant, rank) for rank in shapes}
            if all(block.shape == shapes[rank] for rank, block in blocks.items()) and blocks not in fitting:
                fitting.append(blocks)
    if len(fitting) > 1:
        raise UnsupportedError(f"tensor `{printable(name)}` ({spec}) can be merged in more than one way")
    if fitting:
        return fitting[0]
    rank = next(rank for rank, shape in shapes.items() if block_of_rank(spec, rank).shape != shape)
    raise CorruptError(
        f"tensor `{printable(name)}` ({spec}): rank {rank} should hold {list(block_of_rank(spec, rank).shape)} of it, "
        f"and holds {list(shapes[rank])}"
    )


def _placement(record: Value, shape: Shape, where: Path) -> Placement:
    name = record.cls.name if isinstance(record, Record) else type(record).__name__
    if name == "Replicate":
        return Placement()
    if name not in ("Shard", "_StridedShard"):
        raise UnsupportedError(
            f"a tensor is placed as {name}: each rank holds one term of a sum, or the placement is not known",
            where=where,
            hint="Save it after the reduction: call `full_tensor()`, or redistribute it to Shard or Replicate.",
        )
    axis = attribute(record, "dim", int, where)
    factor = attribute(record, "split_factor", int, where) if name == "_StridedShard" else 1
    if not 0 <= axis < len(shape) or not 0 < factor <= MAX_NUMBER:
        raise CorruptError(f"a tensor of shape {list(shape)} is placed as {name}(dim={axis}, sf={factor})", where=where)
    return Placement(axis, factor)


def _order(stated: Value, placements: tuple[Placement, ...], where: Path) -> tuple[int, ...]:
    """The order in which the dimensions of the mesh split the tensor: left to right, or as the spec states it."""
    default = tuple(range(len(placements)))
    if stated is None:
        return default
    order: list[int] = []
    for entry in stated if isinstance(stated, tuple) else (None,):
        arguments = entry.args if isinstance(entry, Record) else entry
        if not isinstance(arguments, tuple) or len(arguments) != 2:
            raise CorruptError("the order in which a tensor is split is malformed", where=where)
        dims = numbers(arguments[1], "the order in which a tensor is split", where)
        if any(dim >= len(placements) or placements[dim].axis != arguments[0] for dim in dims):
            raise CorruptError("the order in which a tensor is split contradicts its placements", where=where)
        order += dims
    if sorted(order) != [dim for dim in default if placements[dim].axis is not None]:
        raise CorruptError(
            "the order in which a tensor is split does not name every dimension exactly once", where=where
        )
    return (*order, *(dim for dim in default if placements[dim].axis is None))
