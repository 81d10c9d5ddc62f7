"""How FSDP2 cuts tensors over a mesh, and who writes which block.

A mesh of `dp` times `tp` ranks is numbered row by row. Tensor parallelism cuts
first, along an axis of the tensor's own; FSDP2 then cuts what each rank has
along axis 0. Both cut as torch.chunk does: into pieces of the length rounded
up, the last of them shorter or empty. Any other rectangles would be loaded
just as well; these are the ones that the job saves itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckpt_formats.core.geometry import Box, Shape


@dataclass(frozen=True)
class RankGrid:
    """Ranks in two dimensions."""

    dp: int
    tp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp

    def rank(self, dp: int, tp: int) -> int:
        return dp * self.tp + tp


def blocks(shape: Shape, mesh: RankGrid, axis: int | None = None) -> Iterator[tuple[Box, Sequence[int]]]:
    """The blocks of a tensor that hold something, each with the ranks that hold it.

    `axis` is the one that tensor parallelism cuts along; with None, all its ranks hold the same.
    """
    if not shape:
        yield Box((), ()), range(mesh.world)
        return
    whole = Box.whole(shape)
    across = (
        [(whole, range(mesh.tp))]
        if axis is None
        else [(piece, range(i, i + 1)) for i, piece in _pieces(whole, axis, mesh.tp)]
    )
    for block, columns in across:
        for row, piece in _pieces(block, 0, mesh.dp):
            yield piece, [mesh.rank(row, column) for column in columns]


def _pieces(block: Box, axis: int, count: int) -> Iterator[tuple[int, Box]]:
    """What torch.chunk makes of a block, without the empty pieces."""
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
    """How much each rank has been given to write."""

    ranks: int
    nbytes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = [0] * self.ranks

    def give(self, holders: Sequence[int], nbytes: int) -> int:
        """The one of the holders with the least to write; it has so much more now."""
        rank = holders[0] if len(holders) == 1 else min(holders, key=self.nbytes.__getitem__)
        self.nbytes[rank] += nbytes
        return rank
