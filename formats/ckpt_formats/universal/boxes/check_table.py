"""Check the table of boxes before it is used: it may be hostile. Raises `CorruptError`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from ckpt_formats.core.claims import MAX_AXES, MAX_ELEMENTS
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.geometry import Box, overlaps
from ckpt_formats.core.text import printable
from ckpt_formats.universal.boxes.table import BoxPlace, BoxTable
from ckpt_formats.universal.index import Index

_FEW = 64
"""So many boxes are compared each with each."""


def check_boxes(table: BoxTable, index: Index, path: Path) -> None:
    """Raise `CorruptError` unless the columns fit each other and the index, and boxes have every element once."""
    _TableCheck(table, index, path).run()


def first_gap_or_overlap(places: Sequence[BoxPlace]) -> str | None:
    """What is wrong with boxes that should have every element of one tensor once, in words; None if they have."""
    shape = places[0].shape
    if any(place.shape != shape for place in places):
        return "its boxes state different shapes"
    if sum(place.size for place in places) != prod(shape):
        return f"its boxes have {sum(place.size for place in places):,} elements of {prod(shape):,}"
    ranges = [(place.first, place.first + place.size) for place in places if place.size]
    if all(place.block == places[0].block for place in places):  # ranges of one block: no arithmetic of blocks
        ranges.sort()
        overlap = any(low < high for (_, high), (low, _) in pairwise(ranges))
    else:
        overlap = _overlap([box for place in places for box in place.boxes()])
    # Boxes within the shape that do not overlap leave no gap if they are as large as the whole.
    return "two of its boxes overlap" if overlap else None


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
        for number in range(len(self.table)):
            self._parameter(number)

    def _true(self, right: bool, message: str) -> None:
        if not right:
            raise CorruptError(f"the index is not valid: {message}", where=self.path)

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
            raise CorruptError("the index is not valid: a parameter's name is not UTF-8", where=self.path) from None
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

    def _parameter(self, number: int) -> None:
        name = printable(self.table.names[number])
        rows = self.table.rows(number)
        columns = self.index.columns
        for key, what in (("parameter.role", "role"), ("parameter.values", "values")):
            self._true(len({int(columns[key][row]) for row in rows}) == 1, f"`{name}`: boxes of different {what}")
        places: dict[str, list[tuple[int, BoxPlace]]] = {}
        dtypes: dict[str, set[str]] = {}
        for row in rows:
            for state, stored in self.index[row].states.items():
                place = self.table.place(row, stored.shape)
                self._true(_fits(place), f"`{name}` {state}: a box of another shape than its block")
                places.setdefault(state, []).append((row, place))
                dtypes.setdefault(state, set()).add(stored.dtype)
        checked: dict[tuple[int, ...], str | None] = {}  # the states of an optimizer mostly are in the same boxes
        for state, own in places.items():
            self._true(len(dtypes[state]) == 1, f"`{name}` {state}: boxes of different types")
            same = tuple(row for row, _ in own)
            if same not in checked:
                checked[same] = first_gap_or_overlap([place for _, place in own])
            problem = checked[same]
            self._true(problem is None, f"`{name}` {state}: {problem}")


def _fits(place: BoxPlace) -> bool:
    if place.own == place.block.shape:
        return place.first == 0
    return len(place.own) == 1 and place.first + place.own[0] <= place.block.size
