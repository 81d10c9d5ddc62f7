"""`DTensor`s: one rank's block of a tensor, and a description of how all ranks' blocks make the whole.

Saved as `_rebuild_wrapper_subclass(DTensor, dtype, shape, ...)` with the state
`{_local_tensor, _spec: DTensorSpec{mesh, placements, tensor_meta, shard_order}}`.

Source: torch.distributed.tensor, _dtensor_spec.py, placement_types.py and _utils.py, 2.4 to 2.13.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import Corrupt, Unsupported
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Fragment, Tensor, from_fragments, with_replicas
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Record, Value
from ckpt_formats.engines.fsdp_ranks.lookups import attribute, numbers, parts
from ckpt_formats.engines.fsdp_ranks.mesh import Mesh, mesh_of
from ckpt_formats.engines.fsdp_ranks.placement import Placement, PlacementSpec, RankBlock, cut, cut_first

_MOST_FACTOR = 1 << 20


@dataclass(frozen=True, slots=True)
class DTensor:
    """What one rank holds."""

    spec: PlacementSpec
    local: TensorRef


@dataclass(frozen=True)
class MeshCache:
    """The meshes of one rank's file. Its tensors share few of them, and each is decoded once."""

    rank: int
    where: Path
    same: dict[Mesh, Mesh]
    """Shared with the files of other ranks: equal meshes are one object, compared in no time."""
    specs: dict[PlacementSpec, PlacementSpec]
    """Likewise."""
    _decoded: dict[int, tuple[Value, Mesh]] = field(default_factory=dict)

    def of(self, record: Value) -> Mesh:
        if id(record) not in self._decoded:
            mesh = mesh_of(record, self.rank, self.where)
            self._decoded[id(record)] = record, self.same.setdefault(mesh, mesh)
        return self._decoded[id(record)][1]


def dtensor_of(record: Record, meshes: MeshCache) -> DTensor:
    """The DTensor that was saved as this record. Raises `Corrupt`, `Unsupported`."""
    where, arguments = meshes.where, record.args[2]
    state = {key: value for part in parts(record.args[3]) for key, value in part.items()}
    spec, local = state.get("_spec"), state.get("_local_tensor")
    if not isinstance(local, TensorRef):
        said = local.args[1] if isinstance(local, Record) and len(local.args) > 1 else type(local).__name__
        raise Unsupported(f"a DTensor whose own tensor is a {said}", where=where)
    if not isinstance(spec, Record) or not isinstance(arguments, tuple) or len(arguments) < 3:
        raise Corrupt("a DTensor does not say how it is spread", where=where)
    shape = numbers(arguments[2], "the shape of a DTensor", where)
    meta = spec.get("tensor_meta")
    if isinstance(meta, Record) and meta.args and numbers(meta.args[0], "the shape of a DTensor", where) != shape:
        raise Corrupt(f"a DTensor has the shapes {list(shape)} and {list(meta.args[0])}", where=where)
    if arguments[1] != Global("torch", local.dtype.name):
        raise Corrupt(f"a DTensor of {arguments[1]} has a tensor of {local.dtype.name} inside", where=where)
    mesh = meshes.of(spec.get("mesh"))
    listed = attribute(spec, "placements", tuple, where)
    if len(listed) != len(mesh.shape):
        raise Corrupt(f"{len(listed)} placements on a mesh of {len(mesh.shape)} dimensions", where=where)
    placements = tuple(_placement(one, shape, where) for one in listed)
    found = PlacementSpec(shape, mesh, placements, _order(spec.get("shard_order"), placements, where))
    return DTensor(meshes.specs.setdefault(found, found), local)


def gather(name: str, held: Mapping[int, DTensor]) -> Tensor:
    """The whole tensor, of what each rank of its mesh holds.

    Ranks that differ only along dimensions that replicate hold copies, which are
    compared when they are read. Raises `Corrupt` if a rank is missing or contradicts.
    """
    first = next(iter(held.values()))
    spec, dtype = first.spec, first.local.dtype
    for rank in spec.mesh.ranks:
        if rank not in held:
            raise Corrupt(
                f"tensor `{printable(name)}` is spread over {spec.mesh}, but rank {rank} lacks it",
                hint="Files of several steps or runs may be mixed: copy those of one step again.",
            )
        if held[rank].spec != spec or held[rank].local.dtype != dtype:
            raise Corrupt(
                f"tensor `{printable(name)}` is {dtype.name}, {spec} on one rank, "
                f"but {held[rank].local.dtype.name}, {held[rank].spec} on rank {rank}",
                hint="Files of several steps or runs may be mixed: copy those of one step again.",
            )
    cuts = _cuts(name, spec, {rank: held[rank].local.shape for rank in spec.mesh.ranks})
    copies: dict[Shape, list[Fragment]] = {}
    for rank, own in cuts.items():
        (local,) = tensor_of(held[rank].local).fragments
        kept = copies.setdefault(spec.copy(rank), [])
        kept += (Fragment(placed.whole, local.blob.crop(placed.local)) for placed in own.blocks())
    return with_replicas([from_fragments(spec.shape, fragments, dtype) for fragments in copies.values()])


def _cuts(name: str, spec: PlacementSpec, shapes: Mapping[int, Shape]) -> dict[int, RankBlock]:
    """What each rank has, as the spec says it; of the ways to read that, the one that the ranks' own shapes fit."""
    plain = cut_first(spec) if any(placement.factor > 1 for placement in spec.placements) else None
    fitting: list[dict[int, RankBlock]] = []
    for way in (spec, plain):
        if way is not None:
            cuts = {rank: cut(way, rank) for rank in shapes}
            if all(own.shape == shapes[rank] for rank, own in cuts.items()) and cuts not in fitting:
                fitting.append(cuts)
    if len(fitting) > 1:
        raise Unsupported(f"tensor `{printable(name)}` ({spec}) can be put together in more than one way")
    if fitting:
        return fitting[0]
    rank = next(rank for rank, shape in shapes.items() if cut(spec, rank).shape != shape)
    raise Corrupt(
        f"tensor `{printable(name)}` ({spec}): rank {rank} should hold {list(cut(spec, rank).shape)} of it, "
        f"and holds {list(shapes[rank])}"
    )


def _placement(record: Value, shape: Shape, where: Path) -> Placement:
    name = record.cls.name if isinstance(record, Record) else type(record).__name__
    if name == "Replicate":
        return Placement()
    if name not in ("Shard", "_StridedShard"):
        raise Unsupported(
            f"a tensor is placed as {name}: each rank holds a part of a sum, or something that we do not know",
            where=where,
            hint="Save it after it is reduced: `full_tensor()`, or redistributed to Shard or Replicate.",
        )
    axis = attribute(record, "dim", int, where)
    factor = attribute(record, "split_factor", int, where) if name == "_StridedShard" else 1
    if not 0 <= axis < len(shape) or not 0 < factor <= _MOST_FACTOR:
        raise Corrupt(f"a tensor of shape {list(shape)} is placed as {name}(dim={axis}, sf={factor})", where=where)
    return Placement(axis, factor)


def _order(said: Value, placements: tuple[Placement, ...], where: Path) -> tuple[int, ...]:
    """Left to right, unless the spec gives an order for the dimensions that cut one axis."""
    default = tuple(range(len(placements)))
    if said is None:
        return default
    order: list[int] = []
    for entry in said if isinstance(said, tuple) else (None,):
        arguments = entry.args if isinstance(entry, Record) else entry
        if not isinstance(arguments, tuple) or len(arguments) != 2:
            raise Corrupt("the order in which a tensor is cut is malformed", where=where)
        dims = numbers(arguments[1], "the order in which a tensor is cut", where)
        if any(dim >= len(placements) or placements[dim].axis != arguments[0] for dim in dims):
            raise Corrupt("the order in which a tensor is cut contradicts its placements", where=where)
        order += dims
    if sorted(order) != [dim for dim in default if placements[dim].axis is not None]:
        raise Corrupt("the order in which a tensor is cut does not name every dimension that cuts it once", where=where)
    return (*order, *(dim for dim in default if placements[dim].axis is None))
