"""How to get from one end of a range to the other over pieces of it whose checksums are known. Arithmetic only."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a range, and its checksum."""

    start: int
    stop: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step: from `start` to `stop`, which is less than `start` if it goes back."""

    start: int
    stop: int
    checksum: int | None
    """Of the part between; None if it is no piece."""


def steps_over(nbytes: int, pieces: Iterable[Piece]) -> list[Step]:
    """The steps from 0 to `nbytes` that pass the fewest bytes outside of pieces. Pieces may overlap.

    >>> [(step.start, step.stop) for step in steps_over(9, [Piece(0, 5, 1), Piece(3, 9, 2), Piece(3, 5, 3)])]
    [(0, 5), (5, 3), (3, 9)]
    """
    steps = _steps_by_start(nbytes, pieces)
    arrived: dict[int, Step] = {}
    number = count()
    ahead = [(0, next(number), Step(0, 0, None))]
    while nbytes not in arrived:
        outside, _, step = heappop(ahead)
        if step.stop in arrived:
            continue
        arrived[step.stop] = step
        for next_step in steps[step.stop]:
            cost = abs(next_step.stop - next_step.start) if next_step.checksum is None else 0
            heappush(ahead, (outside + cost, next(number), next_step))
    return list(_back(arrived, nbytes))[::-1]


def union(pieces: Iterable[Piece]) -> list[Piece]:
    """The ranges that the pieces cover, disjoint and in order, without checksums (0).

    >>> [(one.start, one.stop) for one in union([Piece(3, 9, 1), Piece(0, 5, 1), Piece(9, 9, 1), Piece(10, 12, 1)])]
    [(0, 9), (10, 12)]
    """
    result = list[Piece]()
    for piece in sorted(pieces, key=lambda one: one.start):
        if result and piece.start <= result[-1].stop:
            result[-1] = Piece(result[-1].start, max(result[-1].stop, piece.stop), 0)
        else:
            result.append(Piece(piece.start, piece.stop, 0))
    return result


def _steps_by_start(nbytes: int, pieces: Iterable[Piece]) -> dict[int, list[Step]]:
    """All steps over a piece, and between neighbouring ends of pieces, in both directions."""
    pieces = list(pieces)
    places = sorted({0, nbytes, *(place for piece in pieces for place in (piece.start, piece.stop))})
    steps: dict[int, list[Step]] = {place: [] for place in places}
    for piece in pieces:
        steps[piece.start].append(Step(piece.start, piece.stop, piece.checksum))
        steps[piece.stop].append(Step(piece.stop, piece.start, piece.checksum))
    for low, high in pairwise(places):
        steps[low].append(Step(low, high, None))
        steps[high].append(Step(high, low, None))
    return steps


def _back(arrived: dict[int, Step], place: int) -> Iterator[Step]:
    while place:
        yield arrived[place]
        place = arrived[place].start
