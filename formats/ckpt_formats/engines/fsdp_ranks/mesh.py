"""Read device meshes: the coordinates of ranks in the grid over which a tensor is distributed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Record, Value, is_natural
from ckpt_formats.engines.fsdp_ranks.folder import MAX_RANKS
from ckpt_formats.engines.fsdp_ranks.lookups import attribute, numbers

_RENAMED = "Was the file renamed, or copied over another rank's?"


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks. Invariant: `ranks` are distinct, in C order of their coordinates, and `prod(shape)` many."""

    shape: Shape
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    """The names of the dimensions; empty if they have none."""

    def coordinate(self, rank: int) -> Shape:
        """The coordinates of a rank of the mesh."""
        return self._coordinates[rank]

    @cached_property
    def _coordinates(self) -> dict[int, Shape]:
        return dict(zip(self.ranks, product(*map(range, self.shape)), strict=True))

    def __str__(self) -> str:
        return " x ".join(map(str, self.shape)) + f" of ranks {list(self.ranks)}"


def mesh_of(record: Value, rank: int, where: Path) -> Mesh:
    """The mesh that was saved as a `DeviceMesh` in the file of one rank. Raises `CorruptError`."""
    if not isinstance(record, Record) or record.cls.name != "DeviceMesh":
        raise CorruptError("a DTensor has no device mesh", where=where)
    stored = record.get("mesh")
    shape, ranks = _from_tensor(stored, where) if isinstance(stored, TensorRef) else _from_layout(record, rank, where)
    if len(set(ranks)) != len(ranks) or prod(shape) != len(ranks):
        raise CorruptError(f"a device mesh of shape {list(shape)} has the ranks {list(ranks)[:20]}", where=where)
    if rank not in ranks:
        raise _lacks_rank(rank, ranks, where)
    names = record.get("_mesh_dim_names", record.get("mesh_dim_names"))
    named = isinstance(names, (tuple, list)) and len(names) == len(shape) and all(isinstance(n, str) for n in names)
    mesh = Mesh(shape, ranks, tuple(names) if named else ())
    coordinate = record.get("_coordinate_on_dim")
    if coordinate is not None and tuple(coordinate) != mesh.coordinate(rank):
        raise CorruptError(
            f"the file of rank {rank} was written by the rank at {list(coordinate)} of its mesh, "
            f"but rank {rank} is at {list(mesh.coordinate(rank))}",
            where=where,
            hint=_RENAMED,
        )
    return mesh


def _from_tensor(stored: TensorRef, where: Path) -> tuple[Shape, tuple[int, ...]]:
    """Shape and ranks of a mesh saved by PyTorch until 2.9: the ranks are a tensor."""
    return stored.shape, _values(stored, where)


def _from_layout(record: Record, rank: int, where: Path) -> tuple[Shape, tuple[int, ...]]:
    """Shape and ranks of a mesh saved by later versions: a list of ranks, and sizes and strides of each dimension.

    The mesh may be a slice of a larger mesh, whose list it shares. Then the layout
    fits at several positions of the list; the right one contains this rank.
    """
    listed = record.get("_rank_map")
    if not isinstance(listed, TensorRef):
        raise CorruptError("a device mesh does not state its ranks", where=where)
    ranks = _values(listed, where)
    axes = _axes(attribute(record, "_layout", Record, where), where)
    if prod(size for axis in axes for size, _ in axis) > len(ranks):
        raise CorruptError(f"the layout of a device mesh leaves its {len(ranks)} ranks", where=where)
    if rank not in ranks:
        raise _lacks_rank(rank, ranks, where)
    start = ranks.index(rank)
    start -= sum((start // stride) % size * stride for axis in axes for size, stride in axis if size > 1)
    offsets = [[sum(steps) for steps in product(*([i * s for i in range(n)] for n, s in axis))] for axis in axes]
    positions = [start + sum(steps) for steps in product(*offsets)]
    if start < 0 or max(positions) >= len(ranks):
        raise CorruptError(f"the layout of a device mesh leaves its {len(ranks)} ranks", where=where)
    return tuple(map(len, offsets)), tuple(ranks[i] for i in positions)


def _axes(layout: Record, where: Path) -> list[list[tuple[int, int]]]:
    """(size, stride) pairs for each dimension; a flattened dimension has several pairs."""
    axes = layout.get("axes")
    if isinstance(axes, (tuple, list)):
        pairs = [(attribute(one, "shape", object, where), attribute(one, "stride", object, where)) for one in axes]
    else:  # until PyTorch 2.10: all sizes and all strides
        sizes, strides = layout.get("shape"), layout.get("stride")
        pairs = [(sizes, strides)] if is_natural(sizes) else list(zip(sizes, strides, strict=True))
    return [_steps_of(_flat(size), _flat(stride), where) for size, stride in pairs]


def _steps_of(sizes: Sequence[Value], strides: Sequence[Value], where: Path) -> list[tuple[int, int]]:
    numbers(sizes, "the shape of a device mesh", where)
    numbers(strides, "the strides of a device mesh", where)
    steps = list(zip(sizes, strides, strict=False))
    if len(sizes) != len(strides) or any(size < 1 or (size > 1 and stride < 1) for size, stride in steps):
        raise CorruptError(f"a device mesh has the shape {list(sizes)} at strides {list(strides)}", where=where)
    return steps


def _lacks_rank(rank: int, ranks: Sequence[int], where: Path) -> CorruptError:
    message = f"the file of rank {rank} contains a tensor of a mesh without this rank: ranks {list(ranks)[:20]}"
    return CorruptError(message, where=where, hint=_RENAMED)


def _flat(value: Value, depth: int = 0) -> list[Value]:
    if not isinstance(value, (tuple, list)) or depth > 8 or len(value) > 64:
        return [value]
    return [inner for item in value for inner in _flat(item, depth + 1)]


def _values(ref: TensorRef, where: Path) -> tuple[int, ...]:
    if ref.size > MAX_RANKS or ref.dtype.kind not in "iu":
        raise CorruptError(f"a device mesh of {ref.size:,} values of {ref.dtype.name}", where=where)
    return tuple(int(rank) for rank in read(tensor_of(ref)).reshape(-1))
