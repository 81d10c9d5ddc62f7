"""Compute the blocks of each rank from the placements of a tensor on a mesh. Only arithmetic.

Each dimension of the mesh splits the result of the dimensions before it. `Shard` splits an
axis like `torch.chunk`: parts of ceil(n / k) elements, the last ones shorter or empty.
`_StridedShard` first splits the axis into `factor` parts and then splits each part over the
ranks; a rank has one section of each part. This describes an axis that another dimension of
the mesh has already split, although that dimension comes later in the order of the mesh.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.layout import ShardBlock
from ckpt_formats.engines.fsdp_ranks.mesh import Mesh

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges along one axis, in the order of the rank's own tensor."""

_MAX_RUNS = 1 << 12


@dataclass(frozen=True)
class Placement:
    """How one dimension of a mesh splits a tensor. `axis` is None if it does not: then its ranks have replicas."""

    axis: int | None = None
    factor: int = 1
    """Above 1, the placement is strided."""

    def __str__(self) -> str:
        if self.axis is None:
            return "Replicate()"
        return f"Shard({self.axis})" if self.factor == 1 else f"_StridedShard({self.axis}, {self.factor})"


@dataclass(frozen=True)
class PlacementSpec:
    """How a tensor is distributed over a mesh: a placement for each dimension of the mesh."""

    shape: Shape
    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    """The dimensions of the mesh, in the order in which they split the tensor."""

    def copy(self, rank: int) -> Shape:
        """The coordinates, along replicated dimensions, of the copy to which a rank's block belongs."""
        at = self.mesh.coordinate(rank)
        return tuple(i for i, placement in zip(at, self.placements, strict=True) if placement.axis is None)

    def __str__(self) -> str:
        return f"shape {list(self.shape)}, {', '.join(map(str, self.placements))} on {self.mesh}"


@dataclass(frozen=True)
class RankBlock:
    """The elements of one rank: ranges along each axis, in every combination."""

    axes: tuple[Runs, ...]

    @property
    def shape(self) -> Shape:
        """The shape of the rank's own tensor."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.axes)

    def blocks(self) -> Iterator[ShardBlock]:
        """The blocks, in the rank's own tensor and in the complete tensor.

        Raises `UnsafeError` if they are too many.
        """
        if prod(len(runs) for runs in self.axes) > _MAX_RUNS:
            raise UnsafeError(f"a rank would hold more than {_MAX_RUNS:,} blocks of one tensor")
        shard_runs = [list(_run_offsets(runs)) for runs in self.axes]
        for in_shard, in_tensor in zip(product(*shard_runs), product(*self.axes), strict=True):
            yield ShardBlock(_box(in_shard), _box(in_tensor))


def block_of_rank(spec: PlacementSpec, rank: int) -> RankBlock:
    """The part of the tensor that a rank of the mesh has."""
    at = spec.mesh.coordinate(rank)
    axes: list[Runs] = [((0, length),) for length in spec.shape]
    for dim in spec.order:
        placement = spec.placements[dim]
        if placement.axis is not None:
            runs = _chunks(axes[placement.axis], placement.factor, spec.mesh.shape[dim], at[dim])
            axes[placement.axis] = tuple(runs)
    return RankBlock(tuple(_join_runs(runs) for runs in axes))


def without_strides(spec: PlacementSpec) -> PlacementSpec | None:
    """The same split without strides: each strided dimension splits after the dimensions that make up its factor.

    FSDP2 splits shards of tensor parallelism and describes this with a stride. If sizes
    are not divisible, its shards are those of the order without strides, not of the stride.
    None if there is no such order.
    """
    order: list[int] = []
    for dim in reversed(range(len(spec.placements))):
        position, ranks = 0, 1
        while ranks < spec.placements[dim].factor and position < len(order):
            dim_before = order[position]
            ranks *= spec.mesh.shape[dim_before] if spec.placements[dim_before].axis == spec.placements[dim].axis else 1
            position += 1
        if ranks != spec.placements[dim].factor:
            return None
        order.insert(position, dim)
    plain = tuple(Placement(placement.axis) for placement in spec.placements)
    return PlacementSpec(spec.shape, spec.mesh, plain, tuple(order))


def _chunks(runs: Runs, factor: int, ranks: int, at: int) -> Iterator[tuple[int, int]]:
    """Split into `factor` parts, and yield the section of each part for rank `at` of `ranks`."""
    length = sum(stop - start for start, stop in runs)
    if len(runs) * min(factor, length) > _MAX_RUNS:
        raise UnsafeError(f"a tensor is split into more than {_MAX_RUNS:,} pieces")
    for part in range(min(factor, length)):
        low, high = _chunk(length, factor, part)
        start, stop = _chunk(high - low, ranks, at)
        yield from _slice_runs(runs, low + start, low + stop)


def _chunk(length: int, count: int, index: int) -> tuple[int, int]:
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def _slice_runs(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Elements `start` to `stop` of the concatenated runs."""
    for (low, high), (first, last) in zip(runs, _run_offsets(runs), strict=True):
        if max(start, first) < min(stop, last):
            yield low + max(start, first) - first, high - last + min(stop, last)


def _run_offsets(runs: Runs) -> Iterator[tuple[int, int]]:
    at = 0
    for start, stop in runs:
        yield at, at + stop - start
        at += stop - start


def _join_runs(runs: Runs) -> Runs:
    """The runs without empty ones. Adjacent runs become one."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def _box(runs: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(start for start, _ in runs), tuple(stop for _, stop in runs))
