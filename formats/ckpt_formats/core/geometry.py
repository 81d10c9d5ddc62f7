"""Blocks of tensors. No bytes, no files: arithmetic only.

Every shard of every engine is a `Box` of a whole tensor. Coordinates are
elements, counted from the corner of the tensor that the box belongs to.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType

Shape = tuple[int, ...]

_SMALL_COUNT = 64


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: a half-open range along each axis.

    >>> Box((0, 2), (4, 6)) & Box((3, 0), (9, 3))
    Box(start=(3, 2), stop=(4, 3))
    """

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Shape) -> "Box":
        """The block that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def index(self) -> tuple[slice | EllipsisType, ...]:
        """What to put between brackets to see this block of an array.

        The dots at the end make NumPy give a view of an array without axes too, not a copy of its number.
        """
        return (*(slice(a, b) for a, b in zip(self.start, self.stop, strict=True)), ...)

    def shift(self, by: Shape, sign: int = 1) -> "Box":
        """The same block, `by` elements further along each axis."""
        return Box(
            tuple(a + sign * d for a, d in zip(self.start, by, strict=True)),
            tuple(b + sign * d for b, d in zip(self.stop, by, strict=True)),
        )

    def within(self, outer: "Box") -> "Box":
        """The same block, counted from the corner of `outer`."""
        return self.shift(outer.start, -1)

    def __and__(self, other: "Box") -> "Box | None":
        """What both blocks hold; None if that is nothing. Empty boxes hold nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"

    def minus(self, other: "Box") -> Iterator["Box"]:
        """What is left of this block once `other` is taken out of it, in disjoint blocks."""
        common = self & other
        if common is None:
            yield self
            return
        start, stop = list(self.start), list(self.stop)
        for axis, (a, b) in enumerate(zip(common.start, common.stop, strict=True)):
            if start[axis] < a:
                yield Box(tuple(start), (*stop[:axis], a, *stop[axis + 1 :]))
            if b < stop[axis]:
                yield Box((*start[:axis], b, *start[axis + 1 :]), tuple(stop))
            start[axis], stop[axis] = a, b


def missing(whole: Box, parts: Iterable[Box]) -> list[Box]:
    """The blocks of `whole` that no part covers. Exact, and without a mask array."""
    within = [common for part in parts if (common := whole & part) is not None]
    if len(within) > _SMALL_COUNT and (halves_of_whole := _middle(whole, within)) is not None:
        # Halves have half as many parts each, and each part is taken from everything that is left.
        return [gap for half in halves_of_whole for gap in missing(half, within)]
    gaps = [whole] if whole.size else []
    for part in within:
        gaps = [rest for box in gaps for rest in box.minus(part)]
    return gaps


def _middle(whole: Box, parts: Sequence[Box]) -> tuple[Box, Box] | None:
    """The two halves of a block, divided where a part begins or ends; None if none does so inside."""
    axes = range(len(whole.start))
    ends_by_axis = [sorted({at for box in parts for at in (box.start[i], box.stop[i])}) for i in axes]
    inside = [[at for at in ends if whole.start[i] < at < whole.stop[i]] for i, ends in enumerate(ends_by_axis)]
    axis = max(axes, key=lambda i: len(inside[i]), default=None)
    if axis is None or not inside[axis]:
        return None
    at = inside[axis][len(inside[axis]) // 2]
    start, stop = list(whole.start), list(whole.stop)
    start[axis] = stop[axis] = at
    return Box(whole.start, tuple(stop)), Box(tuple(start), whole.stop)


def overlaps(parts: Iterable[Box]) -> Iterator[tuple[int, int]]:
    """Pairs of indices of parts that hold an element in common."""
    filled = [(i, box) for i, box in enumerate(parts) if box.size]
    axes = range(len(filled[0][1].start)) if filled else ()
    # Swept along the axis with the most cuts, few parts are open at once.
    axis = max(axes, key=lambda axis: len({box.start[axis] for _, box in filled}), default=0)
    interval = slice(axis, axis + 1)
    boxes = sorted((box.start[interval], box.stop[interval], i, box) for i, box in filled)
    open_boxes: list[tuple[Shape, int, Box]] = []
    for low, high, i, box in boxes:
        open_boxes = [a for a in open_boxes if not a[0] or a[0] > low]
        for _, j, other in open_boxes:
            if box & other:
                yield (min(i, j), max(i, j))
        open_boxes.append((high, i, box))


def slab(shape: Shape, axis: int, start: int, stop: int) -> Box:
    """The block of a tensor that lies between two cuts across one axis."""
    before, after = shape[:axis], shape[axis + 1 :]
    return Box((*(0 for _ in before), start, *(0 for _ in after)), (*before, stop, *after))


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Cut a flat range of a C-ordered tensor into blocks, in storage order.

    This is how ZeRO's flat partitions become ordinary shards: a range of an
    n-dimensional tensor is never more than 2n - 1 blocks.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if start % row:
        end = min(stop, first * row)
        for box in flat_boxes(shape[1:], start % row, start % row + end - start):
            yield Box((first - 1, *box.start), (first, *box.stop))
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
    if stop % row and last >= first:
        for box in flat_boxes(shape[1:], 0, stop % row):
            yield Box((last, *box.start), (last + 1, *box.stop))


def slabs(shape: Shape, max_size: int) -> Iterator[Box]:
    """Cut a tensor into blocks of at most `most` elements, in storage order.

    One after another, the blocks are the tensor in C order, so a file can be
    written front to back from them.
    """
    size = prod(shape)
    if size <= max_size:
        if size:
            yield Box.whole(shape)
        return
    row = prod(shape[1:])
    rows = max(max_size, 1) // row
    if rows:
        for low in range(0, shape[0], rows):
            yield slab(shape, 0, low, min(low + rows, shape[0]))
        return
    for i in range(shape[0]):
        for box in slabs(shape[1:], max_size):
            yield Box((i, *box.start), (i + 1, *box.stop))


def flat_ends(box: Box, shape: Shape) -> tuple[int, int]:
    """From which to before which element of the tensor a block reaches, counted in C order."""
    if not box.size:
        return 0, 0
    first = last = 0
    for length, low, high in zip(shape, box.start, box.stop, strict=True):
        first, last = first * length + low, last * length + high - 1
    return first, last + 1
