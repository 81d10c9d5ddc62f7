"""Compute pieces that no holder has any more from parities of them: `parity_requests` states what a parity is.

Nothing here asks a holder: callers say which pieces there are, and fetch what an equation needs.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.native.parity import add_products
from ckpt_formats.parity.code import multiply, parity_matrix, solution
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.parity_requests import ColumnPiece, HeldColumn, HeldParity, ParityName
from ckpt_formats.stores.piece_requests import HeldFile

_MAX_TRIES = 64
"""How many choices of rows are tried for a piece, if parities are damaged."""


@dataclass(frozen=True)
class ParityRow:
    """A parity, and who holds it."""

    address: NetworkAddress
    parity: HeldParity
    places: Mapping[int, frozenset[int]]
    """Of each column, where the pieces that are in the sum begin in the stream."""

    @classmethod
    def of(cls, address: NetworkAddress, parity: HeldParity) -> "ParityRow":
        places = {number: frozenset(one.at for one in column.pieces) for number, column in parity.columns.items()}
        return cls(address, parity, places)

    @property
    def name(self) -> ParityName:
        return self.parity.name

    def knows(self, ends: Sequence[int], start: int, stop: int) -> bool:
        """Whether the sum from `start` to `stop` has just the pieces that are listed, if its columns end so now.

        It has not if a column has grown there, or has become shorter: then its holder was started again.
        """
        listed = [self.parity.columns[at].end if at in self.parity.columns else 0 for at in range(len(ends))]
        return all(
            end == before or (end > before and (before >= stop or end <= start))
            for end, before in zip(ends, listed, strict=True)
        )


@dataclass(frozen=True)
class PieceInParity:
    """A piece, and where it is in the parities of a set."""

    set: "PiecesOfSet"
    column: int
    piece: ColumnPiece


@dataclass(frozen=True)
class Section:
    """A part of a piece, as a sum: of parts of parities, and of other pieces."""

    start: int
    stop: int
    """In the streams of the set."""
    rows: tuple[tuple[ParityRow, int], ...]
    """Parities, and their factors, which are not 0."""
    others: tuple[tuple[ColumnPiece, int], ...]
    """Pieces of other columns, which have all of the section, and their factors."""


class PiecesOfSet:
    """The columns of a set, as all rows that answer know them together."""

    def __init__(self, rows: Sequence[ParityRow]) -> None:
        self.rows = tuple(sorted(rows, key=lambda row: row.name.row))
        self.columns: dict[int, list[ColumnPiece]] = {}
        self._starts: dict[int, list[int]] = {}
        for number in sorted({number for row in rows for number in row.parity.columns}):
            known = [row.parity.columns[number].pieces for row in rows if number in row.parity.columns]
            pieces = {piece.at: piece for own in known for piece in own}
            self.columns[number] = [pieces[at] for at in sorted(pieces)]
            self._starts[number] = sorted(pieces)

    def sections(
        self, column: int, piece: ColumnPiece, rows: Sequence[ParityRow], is_lost: Callable[[ColumnPiece], bool]
    ) -> list[Section] | None:
        """A piece as sums in which only these rows, and no lost pieces, have a factor; None if there are none."""
        start, stop = piece.at, piece.at + piece.nbytes
        others = {number: deque(self._pieces(number, start, stop)) for number in self.columns if number != column}
        cuts = {start, stop}
        for own in others.values():
            cuts |= {end for one in own for end in (one.at, one.at + one.nbytes) if start < end < stop}
        edges, result = sorted(cuts), []
        for low, high in pairwise(edges):
            there = {column: piece}
            for number, own in others.items():
                while own and own[0].at + own[0].nbytes <= low:
                    own.popleft()
                if own and own[0].at <= low and high <= own[0].at + own[0].nbytes:
                    there[number] = own[0]
            missing = [number for number, one in there.items() if number == column or is_lost(one)]
            known = [number for number in there if number not in missing]
            covered = [
                [there[number].at in row.places.get(number, ()) for number in (*missing, *known)] for row in rows
            ]
            name = rows[0].name
            numbers = tuple(row.name.row for row in rows)
            key = (name.data, name.spares, numbers, tuple(missing), tuple(known), tuple(map(tuple, covered)))
            factors = _section_factors(*key)
            if factors is None:
                return None
            of_rows, of_known = factors
            result.append(
                Section(
                    low,
                    high,
                    tuple((row, one) for row, one in zip(rows, of_rows, strict=True) if one),
                    tuple((there[number], one) for number, one in zip(known, of_known, strict=True) if one),
                )
            )
        return result

    def choices(
        self, column: int, piece: ColumnPiece, is_lost: Callable[[ColumnPiece], bool]
    ) -> Iterator[list[Section]]:
        """The sums that give a piece, at most `_MAX_TRIES`: first of any rows, then without rows of those before."""
        without: deque[frozenset[int]] = deque([frozenset()])
        tried, used, count = {frozenset[int]()}, set[frozenset[int]](), 0
        while without and count < _MAX_TRIES:
            excluded, count = without.popleft(), count + 1
            rows = {number: row for number, row in enumerate(self.rows) if number not in excluded}
            sections = self.sections(column, piece, tuple(rows.values()), is_lost) if rows else None
            if sections is None:
                continue
            needed = {id(row) for one in sections for row, _ in one.rows}
            own = frozenset(number for number, row in rows.items() if id(row) in needed)
            if own not in used:
                used.add(own)
                yield sections
            further = [one for one in (excluded | {number} for number in sorted(own)) if one not in tried]
            tried.update(further)
            without.extend(further)

    def _pieces(self, column: int, start: int, stop: int) -> Iterator[ColumnPiece]:
        """The pieces of a column with bytes in a range."""
        starts, pieces = self._starts[column], self.columns[column]
        for at in range(max(bisect_right(starts, start) - 1, 0), bisect_left(starts, stop)):
            if pieces[at].at + pieces[at].nbytes > start:
                yield pieces[at]


@lru_cache(maxsize=1024)
def _section_factors(
    data: int,
    spares: int,
    rows: tuple[int, ...],
    missing: tuple[int, ...],
    known: tuple[int, ...],
    covered: tuple[tuple[bool, ...], ...],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The factors of rows and of known columns in the first of the lost columns; None if the rows do not give it.

    `covered`: of each row, whether it has what is there of each lost, then of each known column.
    """
    matrix = parity_matrix(data, spares)[list(rows)][:, [*missing, *known]] * np.array(covered, np.uint8)
    factors = solution(np.ascontiguousarray(matrix[:, : len(missing)]), 0)
    if factors is None:
        return None
    of_known = multiply(factors[None], np.ascontiguousarray(matrix[:, len(missing) :]))[0]
    return tuple(map(int, factors)), tuple(map(int, of_known))


class PiecesInParity:
    """All that is known of a generation from its parities."""

    def __init__(self, parities: Sequence[tuple[NetworkAddress, HeldParity]]) -> None:
        rows: dict[tuple[int, ...], list[ParityRow]] = {}
        for address, parity in parities:
            rows.setdefault(parity.name.set_key, []).append(ParityRow.of(address, parity))
        self._files: dict[str, dict[int, list[PieceInParity]]] = {}
        """By file and offset: nearly always one."""
        self._columns: dict[str, HeldColumn] = {}
        for own in map(PiecesOfSet, rows.values()):
            for column, pieces in own.columns.items():
                column_of = next(row.parity.columns[column] for row in own.rows if column in row.parity.columns)
                for piece in pieces:
                    placed = PieceInParity(own, column, piece)
                    self._files.setdefault(piece.file, {}).setdefault(piece.offset, []).append(placed)
                    self._columns.setdefault(piece.file, column_of)

    def placed(self, file: str, offset: int) -> Sequence[PieceInParity]:
        """Where a piece is in parities."""
        return self._files.get(file, {}).get(offset, ())

    def files(self, is_lost: Callable[[ColumnPiece], bool]) -> Iterator[tuple[str, HeldFile]]:
        """Each file, as far as all its pieces are there or can be computed.

        `is_lost`: whether nobody has a piece.
        """
        for name, places in self._files.items():
            pieces, end, starts, step = [], 0, False, 0
            while (placed := places.get(end)) is not None:
                one = next((one.piece for one in placed if not is_lost(one.piece) or _is_there(one, is_lost)), None)
                if one is None:
                    break
                pieces.append((one.nbytes, one.digest))
                end, starts, step = end + one.nbytes, starts or one.starts, one.step
            if pieces:
                yield (
                    name,
                    HeldFile(tuple(pieces), step, starts, self._columns[name].world, self._columns[name].created),
                )


def _is_there(placed: PieceInParity, is_lost: Callable[[ColumnPiece], bool]) -> bool:
    return next(placed.set.choices(placed.column, placed.piece, is_lost), None) is not None


def computed(
    piece: ColumnPiece,
    sections: Sequence[Section],
    sums: Mapping[ParityName, Array],
    others: Mapping[tuple[str, int], Array],
) -> Array:
    """The bytes of a piece: (n,) uint8.

    `sums`: of each parity that a section names, its bytes where the piece is; `others`: the pieces that they name.
    """
    result: Array = np.zeros((1, piece.nbytes), np.uint8)
    for one in sections:
        own = slice(one.start - piece.at, one.stop - piece.at)
        inputs = [(sums[row.name][own], factor) for row, factor in one.rows] + [
            (others[other.file, other.offset][one.start - other.at : one.stop - other.at], factor)
            for other, factor in one.others
        ]
        factors = np.array([[factor for _, factor in inputs]], np.uint8)
        add_products(factors, np.stack([values for values, _ in inputs]), result[:, own])
    return result.reshape(-1)


def rows_of(sections: Sequence[Section]) -> list[ParityRow]:
    """The parities that sections need."""
    return list({row.name: row for one in sections for row, _ in one.rows}.values())
