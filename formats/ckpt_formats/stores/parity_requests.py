"""What holders of parity are asked, and what they answer: how hosts keep parity of each other's pieces in memory.

**What is held.** A host's own holder holds all pieces that the host records, as with copies. K + M hosts of a group
form sets (`ckpt_formats.parity.scheme.ParitySet`): K of them are the columns of a set, the other M hold its parities,
one row each. The sender of a rank cuts its files into pieces, and appends each piece to the shortest of its K
columns, so each column is a stream of bytes. Byte x of the parity of row r is the sum over columns c of `factor[r,
c]` times byte x of the stream of c, over GF(2^8), with the factors of `parity_matrix(K, M)`. A stream that is shorter
counts as zeros. Ranks of one host are in sets of their own: their *lane* is their number on the host, so a column has
one sender.

**Invariants.**

1. A holder adds a piece to a parity exactly once, and lists it: the file, its place there and in the stream, its size
   and its hash. The places of a column only grow. A piece that is sent again at a place that is listed changes
   nothing if it is the same one, and is refused if it is another one. A new piece, or a mark, is refused if the
   holder does not have the piece that was sent before: it was freed, and the sender begins anew.
2. So a parity is at any time the sum of exactly those pieces that its holder lists. Streams of different columns, and
   the same stream at different holders, may be known to different ends: a sum has a factor of 0 where a piece is not
   listed.
3. A column is one rank's, and a set has one K and M: other senders are refused.
4. A piece reaches the holder of its host before the parities, unless that holder does not answer.
5. A segment of the log has a generation of its own, so nothing of an abandoned timeline is in its parity. A holder
   that is started again has nothing, and each sender fills it from its first piece on. If a sender cannot read a
   piece any more, since the chain was compacted, it leaves a gap, which counts as zeros.
6. *Marks*, which add nothing, say that the stream of a column has all from which a replay of its rank begins, without
   a gap. An older generation is freed only when each column is marked at each holder that answers, each host's own
   holder that answers has that start, too, and at most M of a group do not answer.

**Reading.** What is lost at a place of the stream are the columns whose own holder does not have the piece. If the
rows that answer have a solution there, the piece is computed, and believed only if it has the hash that its sender
computed. An answer with bytes of a parity says to which end each column was known then, so that bytes and list belong
together.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from struct import Struct
from typing import Any

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.parity.code import MAX_BLOCKS, MAX_LOST
from ckpt_formats.stores import wire
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.piece_requests import (
    MAX_NBYTES,
    PieceName,
    SentPiece,
    ask_list,
    dump_fields,
    fields_of,
    parse_request,
    parse_sent,
)
from ckpt_formats.stores.wire import FrameKind

_NUMBERS_BELOW = 1 << 31


@dataclass(frozen=True)
class ParityName:
    """A row of parity of a set of columns."""

    run: str
    generation: str
    group: int
    number: int
    """Of the set in its group."""
    lane: int
    """The number of the ranks on their hosts."""
    row: int
    data: int
    """The columns of the set."""
    spares: int
    """The rows of the set."""

    def __post_init__(self) -> None:
        PieceName(self.run, self.generation, "x", 0)
        numbers = (self.group, self.number, self.lane, self.row, self.data, self.spares)
        if not all(type(one) is int and 0 <= one < _NUMBERS_BELOW for one in numbers):
            raise CorruptError("a parity without its numbers")
        if not (self.data >= 2 and self.row < self.spares <= MAX_LOST and self.data + self.spares <= MAX_BLOCKS):
            raise CorruptError("a parity of a scheme that there is not")

    @property
    def text(self) -> str:
        """The name for people."""
        return f"parity {self.row} of set {self.number} of group {self.group}, lane {self.lane}"

    @property
    def set_key(self) -> tuple[int, ...]:
        """What all rows of a set have in common."""
        return (self.group, self.number, self.lane, self.data, self.spares)


@dataclass(frozen=True)
class ParityPlace:
    """Where a piece belongs in a parity."""

    parity: ParityName
    column: int
    rank: int
    at: int
    """Where the piece begins in the stream of its column."""
    after: int
    """Where the last piece ends that was sent before: the holder may have freed it since."""

    def __post_init__(self) -> None:
        numbers = (self.column, self.rank, self.at, self.after)
        if not all(type(one) is int for one in numbers):
            raise CorruptError("a place in a parity without its numbers")
        is_place = all(0 <= one <= MAX_NBYTES for one in numbers)
        if not (is_place and self.column < self.parity.data and self.rank < _NUMBERS_BELOW):
            raise CorruptError("a place that no parity has")


@dataclass(frozen=True)
class ColumnPiece:
    """A piece that is part of a parity."""

    file: str
    offset: int
    nbytes: int
    digest: str
    step: int
    """The last step that is whole with this piece of the file."""
    starts: bool
    """Whether the file has all from which a replay begins, with this piece."""
    at: int

    def __post_init__(self) -> None:
        PieceName("run", "generation", self.file, self.offset)
        if not (type(self.nbytes) is type(self.step) is type(self.at) is int and type(self.starts) is bool):
            raise CorruptError("a piece without its numbers")
        if not (0 < self.nbytes <= wire.CHUNK_NBYTES and 0 <= self.at <= MAX_NBYTES):
            raise CorruptError("a piece of a size that no piece has")
        if type(self.digest) is not str or len(bytes.fromhex(self.digest)) != 16:
            raise CorruptError("a piece without its hash")


@dataclass(frozen=True)
class HeldColumn:
    """What a parity has of a column."""

    rank: int
    world: int
    created: int
    is_marked: bool
    """Whether the column has all from which a replay of its rank begins."""
    pieces: tuple[ColumnPiece, ...]
    """In the order of their places in the stream."""

    @property
    def end(self) -> int:
        """Where the last piece ends in the stream."""
        return self.pieces[-1].at + self.pieces[-1].nbytes if self.pieces else 0


@dataclass(frozen=True)
class HeldParity:
    """A parity that a holder has: the sum of the pieces of its columns."""

    name: ParityName
    columns: Mapping[int, HeldColumn]


_NUMBERS = tuple(field.name for field in fields(ParityName))[2:]
_PLACE = ("column", "rank", "at", "after")


def dump_added(place: ParityPlace, piece: SentPiece, content: bytes) -> bytes:
    """The body of ADD. A mark has no content."""
    own = {name: getattr(place.parity, name) for name in _NUMBERS} | {name: getattr(place, name) for name in _PLACE}
    return dump_fields({**own, **fields_of(piece)}, content)


def parse_added(body: bytearray) -> tuple[ParityPlace, SentPiece, bytearray]:
    """A piece, its bytes, and where it belongs. Raises `CorruptError` if it is none, or does not have its hash."""
    piece, content, given = parse_sent(body)
    name = ParityName(piece.name.run, piece.name.generation, *(given.get(one) for one in _NUMBERS))  # type: ignore[arg-type]
    return ParityPlace(name, *(given.get(one) for one in _PLACE)), piece, content  # type: ignore[arg-type]


def dump_parities(parities: Sequence[HeldParity]) -> bytes:
    """The body of HELD, of the parities of a run."""
    rows = []
    for parity in parities:
        columns = [
            [number, one.rank, one.world, one.created, one.is_marked, _dump_pieces(one.pieces)]
            for number, one in parity.columns.items()
        ]
        name = parity.name
        rows.append([name.generation, *(getattr(name, one) for one in _NUMBERS), columns])
    return json.dumps({"parities": rows}, separators=(",", ":")).encode()


def _dump_pieces(pieces: Sequence[ColumnPiece]) -> list[Any]:
    """Files by name, and of each piece the number of its file, and its fields."""
    files = {name: number for number, name in enumerate(dict.fromkeys(piece.file for piece in pieces))}
    rows = [
        [files[piece.file], piece.offset, piece.nbytes, piece.digest, piece.step, piece.starts, piece.at]
        for piece in pieces
    ]
    return [list(files), rows]


def list_parities(connection: Connection, run: str, *, with_pieces: bool = True) -> tuple[HeldParity, ...]:
    """What a holder has of the parity of a run, and of each column all pieces, or none. Raises `CkptError`."""

    def parse(fields: Any) -> tuple[HeldParity, ...]:
        return tuple(_parsed_parity(run, row) for row in fields["parities"])

    request = {"run": run, "pieces": with_pieces}
    return ask_list(connection, FrameKind.PARITIES, request, parse, "a list of parity")


def _parsed_parity(run: str, row: Any) -> HeldParity:
    generation, *numbers, columns = row
    name, parsed = ParityName(run, generation, *numbers), {}
    for number, rank, world, created, is_marked, (files, pieces) in columns:
        ParityPlace(name, number, rank, 0, 0)
        if type(world) is not int or type(created) is not int or type(is_marked) is not bool:
            raise ValueError
        own, end = [], 0
        for file, *values in pieces:
            own.append(ColumnPiece(files[file], *values))
            if own[-1].at < end:
                raise ValueError
            end = own[-1].at + own[-1].nbytes
        parsed[number] = HeldColumn(rank, world, created, is_marked, tuple(own))
    return HeldParity(name, parsed)


def add(connection: Connection, place: ParityPlace, piece: SentPiece, content: bytes) -> None:
    """Let a holder add a piece to a parity. Raises `CkptError`."""
    connection.send(FrameKind.ADD, dump_added(place, piece, content))
    connection.receive(FrameKind.STORED, wire.MAX_REQUEST)


def fetch_sum(connection: Connection, name: ParityName, offset: int, nbytes: int) -> tuple[tuple[int, ...], bytearray]:
    """Bytes of a parity, and where the streams of its columns ended then. Raises `CkptError`."""
    connection.send(FrameKind.SUM, json.dumps({**asdict(name), "offset": offset, "nbytes": nbytes}).encode())
    body = connection.receive(FrameKind.VALUES, wire.MAX_STORE)
    ends = _ends(name.data)
    if len(body) != ends.size + nbytes:
        raise CorruptError("the holder sent a part of a parity of another size", where=connection.where)
    return ends.unpack_from(body), body[ends.size :]


def parse_sum(body: bytearray) -> tuple[ParityName, int, int]:
    """A parity, and the range of it that is asked for. Raises `CorruptError`."""
    given = parse_request(body, {"offset": int, "nbytes": int})
    offset, nbytes = given["offset"], given["nbytes"]
    if not (0 <= offset <= MAX_NBYTES and 0 < nbytes <= wire.CHUNK_NBYTES):
        raise CorruptError("a range that no parity has")
    return ParityName(*(given.get(field.name) for field in fields(ParityName))), offset, nbytes  # type: ignore[arg-type]


def dump_sum(ends: Sequence[int], content: bytearray) -> bytes:
    """The body of VALUES, of a parity."""
    return _ends(len(ends)).pack(*ends) + content


def _ends(columns: int) -> Struct:
    return Struct(f"<{columns}Q")
