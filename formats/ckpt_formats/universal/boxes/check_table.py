"""Check the table of boxes before it is used: it may be hostile. Raises `CorruptError`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from ckpt_formats.core.claims import MAX_AXES, MAX_ELEMENTS
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.geometry import Box, Shape, overlaps
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import printable
from ckpt_formats.universal.boxes.table import BoxPlace, BoxTable
from ckpt_formats.universal.index import Index

NOT_VALID = "the index is not valid"
DIFFERENT_SHAPES = "its boxes state different shapes"
OVERLAP = "two of its boxes overlap"
_FEW = 64
"""So many boxes are compared each with each."""


def check_boxes(table: BoxTable, index: Index, path: Path) -> None:
    """Raise `CorruptError` unless the columns fit each other and the index, and boxes have every element once."""
    _TableCheck(table, index, path).run()


def first_gap_or_overlap(places: Sequence[BoxPlace]) -> str | None:
    """What is wrong with boxes that should have every element of one tensor once, in words; None if they have."""
    shape = places[0].shape
    if any(place.shape != shape for place in places):
        return DIFFERENT_SHAPES
    if sum(place.size for place in places) != prod(shape):
        return wrong_count(sum(place.size for place in places), prod(shape))
    ranges = [(place.first, place.first + place.size) for place in places if place.size]
    if all(place.block == places[0].block for place in places):  # ranges of one block: no arithmetic of blocks
        ranges.sort()
        overlap = any(low < high for (_, high), (low, _) in pairwise(ranges))
    else:
        overlap = _overlap([box for place in places for box in place.boxes()])
    # Boxes within the shape that do not overlap leave no gap if they are as large as the whole.
    return OVERLAP if overlap else None


def wrong_count(count: int, expected: int) -> str:
    """What is wrong with boxes that have too few or too many elements."""
    return f"its boxes have {count:,} elements of {expected:,}"


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes overlap. Boxes that a cut divides are compared on each side: shards of a run always are."""
    pending = [boxes]
    while pending:
        some = pending.pop()
        cut = _cut(some) if len(some) > _FEW else None
        if cut is not None:
            axis, at = cut
            pending += [[box for box in some if (box.start[axis] < at) is lower] for lower in (True, False)]
        elif next(overlaps(some), None) is not None:
            return True
    return False


def _cut(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """An axis, and a place on it that is inside of no box, with boxes on both sides; about in the middle."""
    cuts: list[tuple[int, int, int]] = []
    for axis in range(len(boxes[0].start)):
        spans = sorted((box.start[axis], box.stop[axis]) for box in boxes)
        reach = 0
        for number, (low, high) in enumerate(spans):
            if number and low >= reach:
                cuts.append((abs(2 * number - len(spans)), axis, low))
            reach = max(reach, high)
    return min(cuts)[1:] if cuts else None


@dataclass(frozen=True)
class _TableCheck:
    table: BoxTable
    index: Index
    path: Path

    def run(self) -> None:
        self._lengths()
        self._names()
        self._owners()
        self._blocks()
        self._alike()
        sizes = self._own_sizes()
        self._states(sizes)

    def _true(self, right: bool, message: str) -> None:
        if not right:
            raise CorruptError(f"{NOT_VALID}: {message}", where=self.path)

    def _lengths(self) -> None:
        columns = self.table.columns
        for name, column in columns.items():
            self._true(column.ndim == 1, f"the shape of column {name}")
        for name in ("box.whole", "box.rank", "box.first"):
            self._true(len(columns[name]) == len(self.index), f"the length of column {name}")
        ranks = columns["box.rank"]
        self._true(int(ranks.max(initial=0)) <= MAX_AXES, f"a box of more than {MAX_AXES} dimensions")
        axes = int(ranks.sum(dtype=np.int64))
        for name in ("box.dims", "box.start", "box.stop"):
            self._true(len(columns[name]) == axes, f"the length of column {name}")

    def _names(self) -> None:
        ends, blob = self.table.columns["whole.ends"], self.table.columns["whole.names"]
        rising = len(ends) == 0 or bool((ends[1:] >= ends[:-1]).all())
        self._true(rising and int(ends[-1] if len(ends) else 0) == len(blob), "the ends of names of parameters")
        try:
            count = len(self.table.names)
        except UnicodeDecodeError:
            raise CorruptError(f"{NOT_VALID}: a parameter's name is not UTF-8", where=self.path) from None
        self._true(len(self.table.numbers) == count, "a parameter's name twice")

    def _owners(self) -> None:
        owners = self.table.columns["box.whole"]
        self._true(bool((owners[1:] >= owners[:-1]).all()), "boxes are not in the order of their parameters")
        self._true(int(owners.max(initial=0)) < max(len(self.table), 1), "the number of the parameter of a box")
        has_boxes = np.bincount(owners, minlength=len(self.table)) > 0 if len(self.table) else np.ones(0, np.bool_)
        self._true(bool(has_boxes.all()), "a parameter without boxes")

    def _blocks(self) -> None:
        dims, start, stop = (self.table.columns[f"box.{key}"] for key in ("dims", "start", "stop"))
        self._true(bool(((start <= stop) & (stop <= dims)).all()), "a box that is not within its tensor")
        ranks = self.table.columns["box.rank"].astype(np.int64)
        begins, bound = np.cumsum(ranks) - ranks, np.ones(len(ranks))
        for axis in range(int(ranks.max(initial=0))):
            rows = np.flatnonzero(ranks > axis)
            # A size of zero must not hide the sizes beside it.
            bound[rows] *= np.maximum(dims[begins[rows] + axis].astype(np.float64), 1.0)
            self._true(bool((bound < MAX_ELEMENTS).all()), "the tensor of a box is too large")

    def _all(self, right: Array, rows: Array, message: str) -> None:
        """Raise `CorruptError` unless all are right; the message names the parameter of the first that is not.

        `rows`: the numbers of states, one for each.
        """
        if not right.all():
            row = int(rows[int(np.flatnonzero(~right)[0])])
            box = int(self.index.columns["state.parameter"][row])
            state = self.index.tables.states[int(self.index.columns["state.name"][row])]
            name = self.table.names[self.table.owners[box]]
            self._true(False, f"`{printable(name)}` {printable(state)}: {message}")

    def _alike(self) -> None:
        """All boxes of a parameter have its role and its values."""
        owners = self.table.columns["box.whole"]
        same = owners[1:] == owners[:-1]
        for key, what in (("parameter.role", "role"), ("parameter.values", "values")):
            column = self.index.columns[key]
            wrong = np.flatnonzero(same & (column[1:] != column[:-1]))
            name = self.table.names[int(owners[wrong[0]])] if len(wrong) else ""
            self._true(not len(wrong), f"`{printable(name)}`: boxes of different {what}")

    def _own_sizes(self) -> Array:
        """The elements of each state of a box, which fit its block: (states,) int64."""
        columns, table = self.index.columns, self.table.columns
        box = columns["state.parameter"].astype(np.int64)
        ranks, dims = columns["state.rank"].astype(np.int64), columns["state.dims"].astype(np.int64)
        begins = np.cumsum(ranks) - ranks
        box_ranks = table["box.rank"].astype(np.int64)
        box_begins = np.cumsum(box_ranks) - box_ranks
        lengths = (table["box.stop"] - table["box.start"]).astype(np.int64)
        sizes, blocks = np.ones(len(ranks), np.int64), np.ones(len(box_ranks), np.int64)
        is_block = ranks == box_ranks[box]
        for axis in range(int(box_ranks.max(initial=0))):
            own = np.flatnonzero(box_ranks > axis)
            blocks[own] *= lengths[box_begins[own] + axis]
            both = np.flatnonzero(is_block & (ranks > axis))
            is_block[both] = dims[begins[both] + axis] == lengths[box_begins[box[both]] + axis]
        for axis in range(int(ranks.max(initial=0))):
            rows = np.flatnonzero(ranks > axis)
            sizes[rows] *= dims[begins[rows] + axis]
        first = table["box.first"][box]
        is_block &= first == 0
        room = blocks[box] - np.minimum(first, blocks[box].astype(np.uint64)).astype(np.int64)
        is_range = (ranks == 1) & (first <= blocks[box].astype(np.uint64)) & (sizes <= room)
        self._all(is_block | is_range, np.arange(len(ranks)), "a box of another shape than its block")
        return sizes

    def _states(self, sizes: Array) -> None:
        """Of each state, the boxes have one type and shape, and together every element once."""
        columns = self.index.columns
        box, dtype = columns["state.parameter"].astype(np.int64), columns["state.dtype"]
        owner = self.table.columns["box.whole"][box]
        rows = np.lexsort((box, columns["state.name"], owner))
        same = (owner[rows][1:] == owner[rows][:-1]) & (
            columns["state.name"][rows][1:] == columns["state.name"][rows][:-1]
        )
        self._all(~same | (dtype[rows][1:] == dtype[rows][:-1]), rows[1:], "boxes of different types")
        verdicts: dict[tuple[bytes, bytes], str | None] = {}  # the states of an optimizer mostly are in the same boxes
        for group in np.split(rows, np.flatnonzero(~same) + 1) if len(rows) else ():
            key = box[group].tobytes(), sizes[group].tobytes()
            if key not in verdicts:
                verdicts[key] = self._problem(box[group], sizes[group])
            problem = verdicts[key]
            self._all(np.array([problem is None]), group[:1], problem or "")

    def _problem(self, boxes: Array, sizes: Array) -> str | None:
        """What is wrong with boxes that should have every element of one tensor once; None if they have."""
        columns, axes = self.table.columns, self.table.axes
        low, high = axes[boxes], axes[boxes + 1]
        rank = int(high[0] - low[0])
        if not (high - low == rank).all():
            return DIFFERENT_SHAPES
        at = low[:, None] + np.arange(rank)
        dims, start, stop = (columns[f"box.{key}"][at].astype(np.int64) for key in ("dims", "start", "stop"))
        if not (dims == dims[0]).all():
            return DIFFERENT_SHAPES
        count, expected = sum(sizes.tolist()), prod(dims[0].tolist())
        if count != expected:
            return wrong_count(count, expected)
        varying = np.flatnonzero((start != start[0]).any(axis=0) | (stop != stop[0]).any(axis=0))
        if len(varying) == 1 and (sizes == (stop - start).prod(axis=1)).all():  # shards along one axis
            order = np.lexsort((stop[:, varying[0]], start[:, varying[0]]))
            filled = order[sizes[order] > 0]
            ends, begins = stop[filled, varying[0]][:-1], start[filled, varying[0]][1:]
            return OVERLAP if (ends > begins).any() else None
        places = [
            self.table.place(box, own if size else (0,))
            for box, size, own in zip(boxes.tolist(), sizes.tolist(), self._shapes(boxes, sizes), strict=True)
        ]
        return first_gap_or_overlap(places)

    def _shapes(self, boxes: Array, sizes: Array) -> list[Shape]:
        """Of each box, a shape of as many elements: that of the block, or a vector."""
        shapes = []
        for box, size in zip(boxes.tolist(), sizes.tolist(), strict=True):
            block = self.table.place(box, ()).block
            shapes.append(block.shape if block.size == size else (size,))
        return shapes
