"""Split tensors over a mesh as FSDP2 does, and choose the rank that writes each block.

A mesh of `dp` times `tp` ranks is numbered row by row. Tensor parallelism splits
first, along one axis of the tensor; FSDP2 then splits each rank's shard along axis 0.
Both split like torch.chunk: into parts of the length rounded up, the last ones
shorter or empty. PyTorch could also load other rectangles; these are the blocks that
the job itself saves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckpt_formats.core.geometry import Box, Shape


@dataclass(frozen=True)
class RankGrid:
    """A grid of `dp` times `tp` ranks."""

    dp: int
    tp: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp

    def rank(self, dp: int, tp: int) -> int:
        """The number of the rank at these coordinates."""
        return dp * self.tp + tp


def blocks(shape: Shape, mesh: RankGrid, axis: int | None = None) -> Iterator[tuple[Box, Sequence[int]]]:
    """The non-empty blocks of a tensor, each with the ranks that have it.

    `axis` is the axis that tensor parallelism splits; with None, all tensor-parallel ranks have the same blocks.
    """
    if not shape:
        yield Box((), ()), range(mesh.world)
        return
    full = Box.whole(shape)
    columns_of_block = (
        [(full, range(mesh.tp))]
        if axis is None
        else [(part, range(i, i + 1)) for i, part in _chunks(full, axis, mesh.tp)]
    )
    for block, columns in columns_of_block:
        for row, part in _chunks(block, 0, mesh.dp):
            yield part, [mesh.rank(row, column) for column in columns]


def _chunks(block: Box, axis: int, count: int) -> Iterator[tuple[int, Box]]:
    """The parts into which torch.chunk splits a block, with their numbers; without the empty ones."""
    first, last = block.start[axis], block.stop[axis]
    length = -(-(last - first) // count)
    for i in range(count):
        low, high = first + i * length, min(first + (i + 1) * length, last)
        if low < high and block.size:
            start, stop = list(block.start), list(block.stop)
            start[axis], stop[axis] = low, high
            yield i, Box(tuple(start), tuple(stop))


@dataclass
class BytesPerRank:
    """The number of bytes that each rank has to write."""

    ranks: int
    nbytes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = [0] * self.ranks

    def give(self, holders: Sequence[int], nbytes: int) -> int:
        """Choose the rank of `holders` with the fewest bytes, and add `nbytes` to it."""
        rank = holders[0] if len(holders) == 1 else min(holders, key=self.nbytes.__getitem__)
        self.nbytes[rank] += nbytes
        return rank
