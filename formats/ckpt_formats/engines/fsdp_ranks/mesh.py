"""Device meshes: which rank stands where in the grid that a tensor is spread over."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Record, Value
from ckpt_formats.engines.fsdp_ranks.folder import MOST_RANKS
from ckpt_formats.engines.fsdp_ranks.lookups import attribute, numbers

_RENAMED = "Was the file renamed, or copied over another rank's?"


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks. Law: `ranks` are distinct, in C order of their coordinates, and as many as `shape` says."""

    shape: Shape
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    """Of the dimensions, where they have names."""

    def coordinate(self, rank: int) -> Shape:
        """Where a rank of the mesh stands."""
        return self._places[rank]

    @cached_property
    def _places(self) -> dict[int, Shape]:
        return dict(zip(self.ranks, product(*map(range, self.shape)), strict=True))

    def __str__(self) -> str:
        return " x ".join(map(str, self.shape)) + f" of ranks {list(self.ranks)}"


def mesh_of(record: Value, rank: int, where: Path) -> Mesh:
    """The mesh that a `DeviceMesh` in the file of one rank stands for. Raises `Corrupt`."""
    if not isinstance(record, Record) or record.cls.name != "DeviceMesh":
        raise Corrupt("a DTensor has no device mesh", where=where)
    whole = record.get("mesh")
    shape, ranks = _stated(whole, where) if isinstance(whole, TensorRef) else _laid_out(record, rank, where)
    if len(set(ranks)) != len(ranks) or prod(shape) != len(ranks):
        raise Corrupt(f"a device mesh of shape {list(shape)} has the ranks {list(ranks)[:20]}", where=where)
    if rank not in ranks:
        raise _without(rank, ranks, where)
    names = record.get("_mesh_dim_names", record.get("mesh_dim_names"))
    named = isinstance(names, (tuple, list)) and len(names) == len(shape) and all(isinstance(n, str) for n in names)
    mesh = Mesh(shape, ranks, tuple(names) if named else ())
    said = record.get("_coordinate_on_dim")
    if said is not None and tuple(said) != mesh.coordinate(rank):
        raise Corrupt(
            f"the file of rank {rank} was written by the rank at {list(said)} of its mesh, "
            f"but rank {rank} stands at {list(mesh.coordinate(rank))}",
            where=where,
            hint=_RENAMED,
        )
    return mesh


def _stated(whole: TensorRef, where: Path) -> tuple[Shape, tuple[int, ...]]:
    """Until PyTorch 2.9: the ranks as a tensor."""
    return whole.shape, _values(whole, where)


def _laid_out(record: Record, rank: int, where: Path) -> tuple[Shape, tuple[int, ...]]:
    """Since: a list of ranks, and for each dimension the sizes and strides of the steps through it.

    The mesh may be a slice of a larger one, whose list it shares. Then the layout
    fits the list in several places, and the mesh is where it finds this rank.
    """
    listed = record.get("_rank_map")
    if not isinstance(listed, TensorRef):
        raise Corrupt("a device mesh does not say which ranks it has", where=where)
    ranks = _values(listed, where)
    axes = _axes(attribute(record, "_layout", Record, where), where)
    if prod(size for axis in axes for size, _ in axis) > len(ranks):
        raise Corrupt(f"the layout of a device mesh leaves its {len(ranks)} ranks", where=where)
    if rank not in ranks:
        raise _without(rank, ranks, where)
    at = ranks.index(rank)
    at -= sum((at // stride) % size * stride for axis in axes for size, stride in axis if size > 1)
    places = [[sum(steps) for steps in product(*([i * s for i in range(n)] for n, s in axis))] for axis in axes]
    found = [at + sum(steps) for steps in product(*places)]
    if at < 0 or max(found) >= len(ranks):
        raise Corrupt(f"the layout of a device mesh leaves its {len(ranks)} ranks", where=where)
    return tuple(map(len, places)), tuple(ranks[i] for i in found)


def _axes(layout: Record, where: Path) -> list[list[tuple[int, int]]]:
    """(size, stride) of the steps through each dimension; a dimension made of several has several."""
    axes = layout.get("axes")
    if isinstance(axes, (tuple, list)):
        pairs = [(attribute(one, "shape", object, where), attribute(one, "stride", object, where)) for one in axes]
    else:  # until PyTorch 2.10, all sizes and all strides
        sizes, strides = layout.get("shape"), layout.get("stride")
        pairs = [(sizes, strides)] if is_natural(sizes) else list(zip(sizes, strides, strict=True))
    return [_steps_of(_flat(size), _flat(stride), where) for size, stride in pairs]


def _steps_of(sizes: Sequence[Value], strides: Sequence[Value], where: Path) -> list[tuple[int, int]]:
    numbers(sizes, "the shape of a device mesh", where)
    numbers(strides, "the strides of a device mesh", where)
    steps = list(zip(sizes, strides, strict=False))
    if len(sizes) != len(strides) or any(size < 1 or (size > 1 and stride < 1) for size, stride in steps):
        raise Corrupt(f"a device mesh has the shape {list(sizes)} at strides {list(strides)}", where=where)
    return steps


def _without(rank: int, ranks: Sequence[int], where: Path) -> Corrupt:
    what = f"the file of rank {rank} holds a tensor of a mesh without it: ranks {list(ranks)[:20]}"
    return Corrupt(what, where=where, hint=_RENAMED)


def _flat(value: Value, depth: int = 0) -> list[Value]:
    if not isinstance(value, (tuple, list)) or depth > 8 or len(value) > 64:
        return [value]
    return [inner for item in value for inner in _flat(item, depth + 1)]


def _values(ref: TensorRef, where: Path) -> tuple[int, ...]:
    if ref.size > MOST_RANKS or ref.dtype.kind not in "iu":
        raise Corrupt(f"a device mesh of {ref.size:,} values of {ref.dtype.name}", where=where)
    return tuple(int(rank) for rank in read(tensor_of(ref)).reshape(-1))
