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


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The blocks of a tensor that the ranks of one column of a grid have: one each, from the first row on."""

    column: int | None
    """The number of the column; None if all columns have the same blocks."""
    whole: Box
    """All of the blocks."""
    length: int
    """The length of each block along axis 0; the last one may be shorter."""
    count: int
    """The number of blocks. The rows after them have none."""
    first: int
    """The number of the first block among those of the tensor."""

    def box(self, row: int) -> Box:
        """The block of a row that has one."""
        low, high = self.whole.start[0] + row * self.length, self.whole.stop[0]
        return Box((low, *self.whole.start[1:]), (min(low + self.length, high), *self.whole.stop[1:]))


def block_rows(shape: Shape, grid: RankGrid, axis: int | None = None) -> list[BlockRows]:
    """The blocks of a tensor of this shape, by column of the grid. Columns without blocks are left out.

    The tensor has elements and at least one axis. `axis` is the axis that tensor parallelism splits; with None, all
    tensor-parallel ranks have the same blocks.
    """
    full, columns, first = Box.whole(shape), [], 0
    wholes = [(None, full)] if axis is None else list(_chunks(full, axis, grid.tp))
    for column, whole in wholes:
        rows = whole.stop[0] - whole.start[0]
        length = -(-rows // grid.dp)
        columns.append(BlockRows(column, whole, length, -(-rows // length), first))
        first += columns[-1].count
    return columns


def _chunks(block: Box, axis: int, count: int) -> Iterator[tuple[int | None, Box]]:
    """The parts into which torch.chunk splits a block, with their numbers; without the empty ones."""
    first, last = block.start[axis], block.stop[axis]
    length = -(-(last - first) // count)
    for i in range(count):
        low, high = first + i * length, min(first + (i + 1) * length, last)
        if low < high:
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
