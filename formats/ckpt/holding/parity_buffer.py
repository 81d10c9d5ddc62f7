"""A parity in memory: the sum of pieces of several hosts, to which each piece is added exactly once.

Its memory grows by blocks, each of which has a checksum.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from ckpt.holding.block_check import BLOCK_NBYTES, CHECK_NBYTES, add_to_check, is_as_added
from ckpt_codecs.base import Array
from ckpt_codecs.native.parity import add_products
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.parity.code import parity_matrix
from ckpt_formats.stores.parity_requests import ColumnPiece, HeldColumn, HeldParity, ParityName, ParityPlace
from ckpt_formats.stores.piece_requests import SentPiece


@dataclass
class _Column:
    rank: int
    world: int
    created: int
    is_marked: bool = False
    pieces: list[ColumnPiece] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Where each piece begins in the stream."""

    @property
    def end(self) -> int:
        return self.places[-1] + self.pieces[-1].nbytes if self.pieces else 0


class ParityBuffer:
    """A row of parity of a set of columns. The caller lets one thread in at a time."""

    def __init__(self, name: ParityName) -> None:
        self.name = name
        self._factors = parity_matrix(name.data, name.spares)[name.row].copy()  # without the other rows
        self._columns: dict[int, _Column] = {}
        self._blocks: dict[int, Array] = {}
        self._checks: dict[int, Array] = {}
        self.entries = 0
        """How many pieces were added, and columns: what is listed."""
        self.step = 0
        """The last step that a piece has."""

    @property
    def nbytes(self) -> int:
        """The memory that the sum takes."""
        return BLOCK_NBYTES * len(self._blocks)

    @property
    def check_nbytes(self) -> int:
        """The memory that the checksums take."""
        return CHECK_NBYTES * len(self._checks)

    @property
    def created(self) -> int:
        """When the last of the columns began."""
        return max((column.created for column in self._columns.values()), default=0)

    def is_new(self, place: ParityPlace, piece: SentPiece, nbytes: int) -> bool:
        """Whether the piece is to be added; False if it was. Changes nothing.

        Raises `CorruptError` if another scheme, rank or piece is in its place, and `IncompleteError` if the piece
        that was sent before it is not there.
        """
        if place.parity != self.name:
            raise CorruptError("the set has another scheme", where=piece.name.file)
        column = self._columns.get(place.column) or _Column(place.rank, piece.world, piece.created)
        if column.rank != place.rank:
            raise CorruptError(f"the column is rank {column.rank}'s, not rank {place.rank}'s", where=piece.name.file)
        if not nbytes or place.at >= column.end:
            if column.end != place.after:
                raise IncompleteError("the parity does not have the piece before it", where=piece.name.file)
            return True
        number = bisect_left(column.places, place.at)
        if number == len(column.places) or not _is_same(column.pieces[number], _listed(place, piece, nbytes)):
            raise CorruptError("another piece is in its place in the parity", where=piece.name.file)
        return False

    def growth(self, at: int, nbytes: int) -> int:
        """By how many bytes the memory grows with a piece."""
        return (BLOCK_NBYTES + CHECK_NBYTES) * sum(block not in self._blocks for block in _blocks(at, nbytes))

    def new_entries(self, place: ParityPlace, nbytes: int) -> int:
        """How many entries a piece adds to what is listed."""
        return (nbytes > 0) + (place.column not in self._columns)

    def add(self, place: ParityPlace, piece: SentPiece, content: bytearray) -> None:
        """Add a piece that `is_new`, or mark its column if it has no bytes."""
        column = self._columns.get(place.column) or _Column(place.rank, piece.world, piece.created)
        if content:
            values = np.frombuffer(content, np.uint8)[None]
            factor = np.array([[self._factors[place.column]]], np.uint8)
            # Memory is taken first: if there is none, nothing was added, and the piece may be sent again.
            blocks = {
                block: np.zeros(BLOCK_NBYTES, np.uint8)
                for block in _blocks(place.at, len(content))
                if block not in self._blocks
            }
            ranges = _ranges(place.at, len(content))
            checks = {block: np.zeros(CHECK_NBYTES, np.uint8) for block in blocks}
            firsts = [block * BLOCK_NBYTES + start - place.at for block, start, _ in ranges]
            parts = [
                np.ascontiguousarray(values[:, first : first + stop - start])
                for first, (_, start, stop) in zip(firsts, ranges, strict=True)
            ]
            self._blocks |= blocks
            self._checks |= checks
            for part, (block, start, stop) in zip(parts, ranges, strict=True):
                add_products(factor, part, self._blocks[block][None, start:stop])
                add_to_check(self._checks[block], int(factor[0, 0]), part[0], start)
            column.pieces.append(_listed(place, piece, len(content)))
            column.places.append(place.at)
            self.step = max(self.step, piece.step)
        else:
            column.is_marked = True
        self.entries += self.new_entries(place, len(content))
        self._columns[place.column] = column

    @property
    def blocks(self) -> list[int]:
        """The numbers of the blocks that have memory."""
        return list(self._blocks)

    def is_damaged(self, block: int) -> bool:
        """Whether a block is not the sum of what was added to it; False if it has no memory."""
        return block in self._blocks and not is_as_added(self._blocks[block], self._checks[block])

    def read(self, offset: int, nbytes: int) -> tuple[list[int], bytearray]:
        """Where the columns end, and bytes of the sum."""
        content = bytearray(nbytes)
        for block, start, stop in _ranges(offset, nbytes):
            if block in self._blocks:
                first = block * BLOCK_NBYTES + start - offset
                content[first : first + stop - start] = self._blocks[block][start:stop].data
        columns = (self._columns.get(number) for number in range(self.name.data))
        return [0 if column is None else column.end for column in columns], content

    def listing(self, with_pieces: bool) -> HeldParity:
        """What it is the sum of."""
        columns = {
            number: HeldColumn(
                one.rank, one.world, one.created, one.is_marked, tuple(one.pieces) if with_pieces else ()
            )
            for number, one in self._columns.items()
        }
        return HeldParity(self.name, columns)


def _listed(place: ParityPlace, piece: SentPiece, nbytes: int) -> ColumnPiece:
    return ColumnPiece(piece.name.file, piece.name.offset, nbytes, piece.digest, piece.step, piece.starts, place.at)


def _is_same(one: ColumnPiece, other: ColumnPiece) -> bool:
    return (one.file, one.offset, one.nbytes, one.digest, one.at) == (
        other.file,
        other.offset,
        other.nbytes,
        other.digest,
        other.at,
    )


def _blocks(at: int, nbytes: int) -> range:
    return range(at // BLOCK_NBYTES, -(-(at + nbytes) // BLOCK_NBYTES)) if nbytes else range(0)


def _ranges(at: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Each block of a range, and where the range begins and ends in it."""
    return [
        (block, max(at - block * BLOCK_NBYTES, 0), min(at + nbytes - block * BLOCK_NBYTES, BLOCK_NBYTES))
        for block in _blocks(at, nbytes)
    ]
