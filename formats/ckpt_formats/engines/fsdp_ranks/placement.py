"""How a tensor is cut over a mesh: from placements to the blocks of each rank. Arithmetic only.

Each dimension of the mesh cuts what the ones before it left. `Shard` cuts an axis as
`torch.chunk` does: pieces of ceil(n / k), the last ones shorter or empty.
`_StridedShard` first cuts into `factor` pieces, then each of them, and a rank has one
piece of each: so it cuts an axis that another dimension, applied later, cut first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ckpt_formats.core.errors import Unsafe
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.layout import ShardBlock
from ckpt_formats.engines.fsdp_ranks.mesh import Mesh

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges along one axis, in the order in which a rank has them."""

_MOST_RUNS = 1 << 12


@dataclass(frozen=True)
class Placement:
    """What one dimension of a mesh does to a tensor. `axis` is None if each of its ranks has all."""

    axis: int | None = None
    factor: int = 1
    """Above 1: strided."""

    def __str__(self) -> str:
        if self.axis is None:
            return "Replicate()"
        return f"Shard({self.axis})" if self.factor == 1 else f"_StridedShard({self.axis}, {self.factor})"


@dataclass(frozen=True)
class PlacementSpec:
    """How a tensor is spread over a mesh: a placement for each dimension of the mesh."""

    shape: Shape
    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    """The dimensions of the mesh, in the order in which they cut."""

    def copy(self, rank: int) -> Shape:
        """Which of several whole copies a rank's block belongs to."""
        at = self.mesh.coordinate(rank)
        return tuple(i for i, placement in zip(at, self.placements, strict=True) if placement.axis is None)

    def __str__(self) -> str:
        return f"shape {list(self.shape)}, {', '.join(map(str, self.placements))} on {self.mesh}"


@dataclass(frozen=True)
class RankBlock:
    """What one rank has: ranges along each axis, of which it holds every combination."""

    axes: tuple[Runs, ...]

    @property
    def shape(self) -> Shape:
        """Of the rank's own tensor."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.axes)

    def blocks(self) -> Iterator[ShardBlock]:
        """The blocks, in the rank's own tensor and in the whole one."""
        if prod(len(runs) for runs in self.axes) > _MOST_RUNS:
            raise Unsafe(f"a rank would hold more than {_MOST_RUNS:,} blocks of one tensor")
        local = [list(_end_to_end(runs)) for runs in self.axes]
        for ours, theirs in zip(product(*local), product(*self.axes), strict=True):
            yield ShardBlock(_box(ours), _box(theirs))


def cut(spec: PlacementSpec, rank: int) -> RankBlock:
    """What a rank of the mesh has of the tensor."""
    at = spec.mesh.coordinate(rank)
    axes: list[Runs] = [((0, length),) for length in spec.shape]
    for dim in spec.order:
        placement = spec.placements[dim]
        if placement.axis is not None:
            runs = _chunks(axes[placement.axis], placement.factor, spec.mesh.shape[dim], at[dim])
            axes[placement.axis] = tuple(runs)
    return RankBlock(tuple(_joined(runs) for runs in axes))


def cut_first(spec: PlacementSpec) -> PlacementSpec | None:
    """The same cuts with no stride: each strided dimension cuts after those that it leaves room for.

    FSDP2 cuts what tensor parallelism has cut already, and calls that strided. Where
    sizes do not divide, what it cuts so is not what the stride says. None if there is
    no such order.
    """
    order: list[int] = []
    for dim in reversed(range(len(spec.placements))):
        before, ranks = 0, 1
        while ranks < spec.placements[dim].factor and before < len(order):
            other = order[before]
            ranks *= spec.mesh.shape[other] if spec.placements[other].axis == spec.placements[dim].axis else 1
            before += 1
        if ranks != spec.placements[dim].factor:
            return None
        order.insert(before, dim)
    plain = tuple(Placement(placement.axis) for placement in spec.placements)
    return PlacementSpec(spec.shape, spec.mesh, plain, tuple(order))


def _chunks(runs: Runs, factor: int, ranks: int, at: int) -> Iterator[tuple[int, int]]:
    """Cut into `factor` pieces, and take the part of each that the rank at `at` of so many has."""
    length = sum(stop - start for start, stop in runs)
    if len(runs) * min(factor, length) > _MOST_RUNS:
        raise Unsafe(f"a tensor is cut into more than {_MOST_RUNS:,} pieces")
    for piece in range(min(factor, length)):
        low, high = _chunk(length, factor, piece)
        start, stop = _chunk(high - low, ranks, at)
        yield from _taken(runs, low + start, low + stop)


def _chunk(length: int, count: int, index: int) -> tuple[int, int]:
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def _taken(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Elements `start` to `stop` of the runs laid end to end."""
    for (low, high), (first, last) in zip(runs, _end_to_end(runs), strict=True):
        if max(start, first) < min(stop, last):
            yield low + max(start, first) - first, high - last + min(stop, last)


def _end_to_end(runs: Runs) -> Iterator[tuple[int, int]]:
    at = 0
    for start, stop in runs:
        yield at, at + stop - start
        at += stop - start


def _joined(runs: Runs) -> Runs:
    """Without empty runs, and as one where one goes on where the last ended."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def _box(runs: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(start for start, _ in runs), tuple(stop for _, stop in runs))
