"""Blocks of tensors. No bytes, no files: arithmetic only.

Every shard of every engine is a `Box` of a full tensor. Coordinates are
elements, counted from the corner of the tensor to which the box belongs.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any

Shape = tuple[int, ...]
Remainder = tuple[int | slice, ...]
"""The index into the array of a box, for each axis: 0 drops an axis of length 1, a slice takes every n-th element."""

_SMALL_COUNT = 64
"""Up to so many parts, `missing` compares each part with each gap."""


# Not frozen, although nothing changes it: to make a frozen one takes four times as long, and each tensor has one.
@dataclass(slots=True, unsafe_hash=True)
class Box:
    """A block of a tensor: a half-open range along each axis.

    >>> Box((0, 2), (4, 6)) & Box((3, 0), (9, 3))
    Box(start=(3, 2), stop=(4, 3))
    """

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Shape) -> "Box":
        """The block of a tensor of this shape that is all of it."""
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
        """The index of this block in an array: `array[box.index]`.

        The ellipsis at the end makes NumPy return a view also for an array without axes, not a scalar.
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
        """The intersection of both blocks; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"

    def minus(self, other: "Box") -> Iterator["Box"]:
        """The rest of this block without `other`, as disjoint blocks."""
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
    """The blocks of `whole` that no part covers: disjoint, and without a mask array."""
    within = [common for part in parts if (common := whole & part) is not None]
    if len(within) > _SMALL_COUNT and (halves_of_whole := _middle(whole, within)) is not None:
        # Each half has about half as many parts, and the cost grows with the square of their number.
        return [gap for half in halves_of_whole for gap in missing(half, within)]
    gaps = [whole] if whole.size else []
    for part in within:
        gaps = [rest for box in gaps for rest in box.minus(part)]
    return gaps


def _middle(whole: Box, parts: Sequence[Box]) -> tuple[Box, Box] | None:
    """The two halves of a block, split where a part begins or ends; None if none does so inside."""
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
    """Pairs of indices of parts that have an element in common."""
    filled = [(i, box) for i, box in enumerate(parts) if box.size]
    axes = range(len(filled[0][1].start)) if filled else ()
    # A sweep along the axis with the most different starts: then only few parts are open at once.
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
    """The block of a tensor from index `start` to `stop` of one axis, with all of the other axes."""
    before, after = shape[:axis], shape[axis + 1 :]
    return Box((*(0 for _ in before), start, *(0 for _ in after)), (*before, stop, *after))


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Split a flat range of a C-ordered tensor into blocks, in storage order.

    So ZeRO's flat partitions become ordinary shards. A range of an n-dimensional
    tensor is at most 2n - 1 blocks.
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
    """Split a tensor into blocks of at most `max_size` elements, in storage order.

    One after another, the blocks are the tensor in C order, so that a file can be
    written front to back.
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
    """The flat range that a block spans: its first element, and the one after its last, counted in C order."""
    if not box.size:
        return 0, 0
    first = last = 0
    for length, low, high in zip(shape, box.start, box.stop, strict=True):
        first, last = first * length + low, last * length + high - 1
    return first, last + 1


def block_of_key(key: Any, shape: Shape) -> tuple[Box, Remainder]:
    """The box of a tensor of `shape` that holds what a basic index selects, and the index into that box.

    Raises `IndexError` for anything that is not basic indexing, or is out of bounds, as NumPy does; negative steps and
    new axes are not supported.

    >>> block_of_key((slice(2, 8, 3), -1), (10, 7))
    (Box(start=(2, 6), stop=(8, 7)), (slice(None, None, 3), 0))
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    ellipses = sum(1 for one in keys if one is Ellipsis)
    if ellipses > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if len(keys) - ellipses > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} axes, but {len(keys) - ellipses} were indexed")
    at = next((i for i, one in enumerate(keys) if one is Ellipsis), len(keys))
    full = [slice(None)] * (len(shape) - len(keys) + ellipses)
    keys[at : at + ellipses] = full
    start, stop, remainder = [], [], list[int | slice]()
    for one, length in zip(keys, shape, strict=True):
        low, high, rest = _range_of_key(one, length)
        start.append(low)
        stop.append(high)
        remainder.append(rest)
    return Box(tuple(start), tuple(stop)), tuple(remainder)


def _range_of_key(key: Any, length: int) -> tuple[int, int, int | slice]:
    if isinstance(key, slice):
        low, high, step = key.indices(length)
        if step < 1:
            raise IndexError("the step of a slice must be positive")
        return low, max(low, high), slice(None, None, step if step > 1 else None)
    if isinstance(key, bool):
        raise IndexError("only integers, slices (`:`) and ellipsis (`...`) are valid indices")
    try:
        number = operator.index(key)
    except TypeError:
        message = f"only integers, slices (`:`) and ellipsis (`...`) are valid indices, not {type(key).__name__}"
        raise IndexError(message) from None
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of bounds for an axis of length {length}")
    return number % length, number % length + 1, 0
