"""What holders of pieces are asked, and what they answer: docs/peers.md.

A *run* has generations, one for each segment of its log. A generation has files by the names that they have in the
chain, and a file is a row of pieces. Each has at most `wire.CHUNK_NBYTES` bytes, and an XXH3-128 that its sender
computed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import xxhash

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.stores import wire
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.wire import FrameKind

NAME = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
"""A run, a generation, or a part of the name of a file."""
HELD_FILES = "held-files.json"
"""The file that says which files of a base ranks have sent, each some, and their sizes: no file of the chain."""
_LONGEST_NAME = 512
_MAX_PARTS = 6
_TYPES = {"digest": str, "step": int, "starts": bool, "replaces": bool, "world": int, "created": int}
MAX_NBYTES = 1 << 50
"""Of a file, and of a stream of pieces of several."""

T = TypeVar("T")


@dataclass(frozen=True)
class PieceName:
    """A piece of a file."""

    run: str
    generation: str
    file: str
    offset: int
    """Where the piece begins in the file."""

    def __post_init__(self) -> None:
        names = (self.run, self.generation, self.file)
        if not all(isinstance(name, str) and len(name) <= _LONGEST_NAME for name in names):
            raise CorruptError("a name of a piece that is no text, or is too long")
        parts = (self.run, self.generation, *self.file.split("/"))
        if len(parts) > _MAX_PARTS + 2 or not all(NAME.fullmatch(part) for part in parts):
            raise CorruptError("a name that no run, segment or file of a chain has")
        if type(self.offset) is not int or not 0 <= self.offset <= MAX_NBYTES:
            raise CorruptError("a piece at an offset that no file has")


@dataclass(frozen=True)
class SentPiece:
    """A piece of a file, and what its sender says of it."""

    name: PieceName
    digest: str
    """Its XXH3-128, in hexadecimal."""
    step: int
    """The last step that is whole with this piece."""
    starts: bool
    """Whether the file has all from which a replay begins, with this piece."""
    replaces: bool
    """Whether the piece is the whole file, in place of the one before."""
    world: int
    """How many ranks the run has."""
    created: int
    """When its generation began: nanoseconds since 1970, the same for all ranks."""


@dataclass(frozen=True)
class HeldFile:
    """A file that somebody holds: its pieces, without gaps, from its start on."""

    pieces: tuple[tuple[int, str], ...]
    """The size in bytes and the XXH3-128 of each."""
    step: int
    starts: bool
    world: int
    created: int

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.pieces)


@dataclass(frozen=True)
class HeldStatus:
    """What a holder has of a run."""

    run: str
    generations: int
    files: int
    nbytes: int
    """The bytes of its files."""
    parity_nbytes: int
    step: int
    """The last step that one of its files has, or a file whose parity it has."""


_STATUS: dict[str, type[Any]] = {
    "run": str,
    "generations": int,
    "files": int,
    "nbytes": int,
    "parity_nbytes": int,
    "step": int,
}


@dataclass(frozen=True)
class HolderStatus:
    """What a holder has, and what it may have."""

    memory: int
    nbytes: int
    runs: tuple[HeldStatus, ...]


HeldRun = Mapping[str, Mapping[str, HeldFile]]
"""The files of a run, by generation and name."""


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """The XXH3-128 of a piece, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(content)


def dump_piece(piece: SentPiece, content: bytes) -> bytes:
    """The body of STORE."""
    return dump_fields(fields_of(piece), content)


def fields_of(piece: SentPiece) -> dict[str, Any]:
    """The fields of a piece and of its name."""
    fields = asdict(piece)
    return {**fields.pop("name"), **fields}


def dump_fields(fields: Mapping[str, Any], content: bytes) -> bytes:
    """A body of a text with fields, and bytes after it."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "little") + text + content


def parse_piece(body: bytearray) -> tuple[SentPiece, bytearray]:
    """A piece and its bytes. Raises `CorruptError` if it is none, or does not have its hash."""
    piece, content, _ = parse_sent(body)
    if not content:
        raise CorruptError("a piece of no bytes")
    return piece, content


def parse_sent(body: bytearray) -> tuple[SentPiece, bytearray, dict[str, Any]]:
    """A piece, its bytes, of which there may be none, and all fields that were sent. Raises as `parse_piece`."""
    end = 4 + int.from_bytes(body[:4], "little")
    if not 4 < end <= min(len(body), wire.MAX_REQUEST):
        raise CorruptError("not a piece")
    fields = parse_request(body[4:end], _TYPES)
    content = body[end:]
    piece = SentPiece(parse_name(fields), **{name: fields[name] for name in _TYPES})
    if len(content) > wire.CHUNK_NBYTES or not all(0 <= one < 1 << 62 for one in (piece.step, piece.created)):
        raise CorruptError("a piece of a size, step or time that no piece has")
    if digest_of(content) != piece.digest:
        raise CorruptError("a piece does not have its hash: it was damaged before it arrived")
    return piece, content, fields


def parse_name(fields: Mapping[str, Any]) -> PieceName:
    """The name of a piece in a request. Raises `CorruptError`."""
    return PieceName(*(fields.get(name) for name in ("run", "generation", "file", "offset")))  # type: ignore[arg-type]


def parse_request(body: bytes | bytearray, types: Mapping[str, type]) -> dict[str, Any]:
    """The fields of a request, of which some have these types. Raises `CorruptError`."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise CorruptError("not a request") from None
    if not isinstance(fields, dict) or any(type(fields.get(name)) is not kind for name, kind in types.items()):
        raise CorruptError("not a request")
    return fields


def dump_run(run: HeldRun) -> bytes:
    """The body of HELD, of a run."""
    generations = {
        generation: {
            name: [file.step, file.starts, file.world, file.created, file.pieces] for name, file in files.items()
        }
        for generation, files in run.items()
    }
    return json.dumps({"generations": generations}, separators=(",", ":")).encode()


def ask_list(
    connection: Connection, kind: FrameKind, fields: Mapping[str, Any], parse: Callable[[Any], T], what: str
) -> T:
    """What a holder answers to a request for a list. `parse`: reads the JSON; `what`: names the list in an error.

    Raises `CkptError`; `CorruptError` also for whatever `parse` raises of a list that makes no sense.
    """
    connection.send(kind, json.dumps(fields).encode())
    body = connection.receive(FrameKind.HELD, wire.MAX_STATE)
    try:
        return parse(json.loads(body))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, CorruptError):
        raise CorruptError(f"the holder sent {what} that cannot be read", where=connection.where) from None


def list_run(connection: Connection, run: str, *, with_pieces: bool = True) -> HeldRun:
    """What a holder has of a run, and of each file all pieces, or none. Raises `CkptError`."""
    return ask_list(connection, FrameKind.LIST, {"run": run, "pieces": with_pieces}, _parsed_run, "a list")


def holder_status(connection: Connection) -> HolderStatus:
    """What a holder has. Raises `CkptError`."""
    return ask_list(connection, FrameKind.LIST, {}, _parsed_status, "a status")


def _parsed_run(fields: Any) -> HeldRun:
    return {
        generation: {name: _held_file(generation, name, row) for name, row in files.items()}
        for generation, files in fields["generations"].items()
    }


def _parsed_status(fields: Any) -> HolderStatus:
    runs = tuple(HeldStatus(**{name: kind(run[name]) for name, kind in _STATUS.items()}) for run in fields["runs"])
    return HolderStatus(int(fields["memory"]), int(fields["nbytes"]), runs)


def _held_file(generation: str, name: str, row: Any) -> HeldFile:
    PieceName("run", generation, name, 0)
    step, starts, world, created, pieces = row
    if any(type(one) is not int for one in (step, world, created)) or type(starts) is not bool:
        raise ValueError
    rows = []
    for nbytes, digest in pieces:
        if type(nbytes) is not int or not 0 < nbytes <= wire.CHUNK_NBYTES or len(bytes.fromhex(digest)) != 16:
            raise ValueError
        rows.append((nbytes, digest))
    return HeldFile(tuple(rows), step, starts, world, created)


def store(connection: Connection, piece: SentPiece, content: bytes) -> None:
    """Give a piece to a holder. Raises `CkptError`."""
    connection.send(FrameKind.STORE, dump_piece(piece, content))
    connection.receive(FrameKind.STORED, wire.MAX_REQUEST)


def drop(connection: Connection, run: str, before: int, names: Sequence[str] = ()) -> None:
    """Let a holder free the generations of a run that began before this time, and those of these names.

    Raises `CkptError`.
    """
    fields = {"run": run, "before": before, "names": list(names)}
    connection.send(FrameKind.DROP, json.dumps(fields).encode())
    connection.receive(FrameKind.STORED, wire.MAX_REQUEST)


def fetch(connection: Connection, name: PieceName) -> bytearray:
    """The bytes of a piece, as the holder has them: the caller compares their hash. Raises `CkptError`."""
    connection.send(FrameKind.FETCH, json.dumps(vars(name)).encode())
    return connection.receive(FrameKind.VALUES, wire.CHUNK_NBYTES)
