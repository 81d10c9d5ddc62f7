"""Hold pieces of runs in the memory of this process, for as long as it lives: `ckpt hold`.

The memory is anonymous, not a folder in /dev/shm: it has no name that another program could read, change or remove,
and nothing of it stays when the process is killed.
"""

import json
import socket
import ssl
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt.shadow.listener import Listener
from ckpt_formats.core.errors import CorruptError, IncompleteError, NoSpaceError, NotFoundError, UnsupportedError
from ckpt_formats.core.text import format_nbytes
from ckpt_formats.stores import piece_requests, wire
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.piece_requests import HeldFile, HeldRun, HeldStatus, PieceName, SentPiece
from ckpt_formats.stores.wire import FrameKind

IDLE_SECONDS = 3600.0
"""How long a peer may stay without a request."""
SEND_SECONDS = 60.0
"""The time in which a peer must take an answer."""
PIECE_OVERHEAD = 1024
"""The bytes that a piece counts besides its own: its hash, its place, and what Python needs for it."""


@dataclass
class _FileInMemory:
    """A file that is held."""

    pieces: list[bytearray] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)
    """The number of a piece, by where it begins."""
    nbytes: int = 0
    step: int = 0
    starts: bool = False
    world: int = 0
    created: int = 0

    @property
    def counted(self) -> int:
        """The bytes that the file takes of the memory."""
        return self.nbytes + PIECE_OVERHEAD * len(self.pieces)


class HeldPieces:
    """Pieces in memory, at most so many bytes. Threads may share it."""

    def __init__(self, memory: int) -> None:
        """`memory`: the maximum number of bytes."""
        self.memory, self.nbytes = memory, 0
        self._runs: dict[str, dict[str, dict[str, _FileInMemory]]] = {}
        self._freed: dict[str, int] = {}
        """The time of a run before which its generations were freed; only of runs that are held."""
        self._lock = threading.Lock()

    def store(self, piece: SentPiece, content: bytearray) -> int:
        """Add a piece at the end of its file, or replace the file. Returns the bytes of the file that are held.

        A piece that is held already changes nothing. Raises `CorruptError` if another one is held in its place,
        `IncompleteError` if the bytes before it are missing, `NoSpaceError` if it exceeds the memory, and
        `UnsupportedError` if its generation was freed because a newer one is there.
        """
        name = piece.name
        with self._lock:
            if piece.created < self._freed.get(name.run, 0):
                raise UnsupportedError("a newer segment of a run of this name is held, so this one was freed")
            file = self._runs.get(name.run, {}).get(name.generation, {}).get(name.file) or _FileInMemory()
            if not piece.replaces and name.offset < file.nbytes:
                at = file.offsets.get(name.offset)
                if at is None or file.digests[at] != piece.digest:
                    raise CorruptError("another piece is held in its place", where=name.file)
                return file.nbytes
            if name.offset > file.nbytes or (piece.replaces and name.offset):
                raise IncompleteError("the bytes before the piece are not held", where=name.file)
            before = file.counted if piece.replaces else 0
            needed = self.nbytes - before + len(content) + PIECE_OVERHEAD
            if needed > self.memory:
                raise NoSpaceError(
                    f"the holder may use {format_nbytes(self.memory)}, and would need {format_nbytes(needed)}",
                    hint="Start it with more --memory, or store bases more often: the log before them is freed. "
                    "Runs that have ended stay until it is started again.",
                )
            if piece.replaces:
                file = _FileInMemory()
            file.offsets[name.offset] = len(file.pieces)
            file.pieces.append(content)
            file.digests.append(piece.digest)
            file.nbytes += len(content)
            file.step, file.starts, file.world = piece.step, file.starts or piece.starts, piece.world
            file.created = piece.created
            self._runs.setdefault(name.run, {}).setdefault(name.generation, {})[name.file] = file
            self.nbytes = needed
            return file.nbytes

    def fetch(self, name: PieceName) -> bytearray:
        """The bytes of a piece, as they are in memory now. Raises `NotFoundError`."""
        with self._lock:
            file = self._runs.get(name.run, {}).get(name.generation, {}).get(name.file)
            at = None if file is None else file.offsets.get(name.offset)
            if file is None or at is None:
                raise NotFoundError("this piece is not held", where=name.file)
            return file.pieces[at]

    def run(self, run: str, with_pieces: bool = True) -> HeldRun:
        """All files of a run, each with all its pieces, or with none."""
        with self._lock:
            return {
                generation: {
                    name: HeldFile(
                        tuple(zip(map(len, file.pieces), file.digests, strict=True)) if with_pieces else (),
                        file.step,
                        file.starts,
                        file.world,
                        file.created,
                    )
                    for name, file in files.items()
                }
                for generation, files in self._runs.get(run, {}).items()
            }

    def drop(self, run: str, before: int) -> int:
        """Free the generations of a run that began before this time. Returns the bytes that are held now."""
        with self._lock:
            generations = self._runs.get(run, {})
            older = [one for one, files in generations.items() if all(file.created < before for file in files.values())]
            for generation in older:
                self.nbytes -= sum(file.counted for file in generations.pop(generation).values())
            if generations:
                self._freed[run] = max(before, self._freed.get(run, 0))
            else:
                self._runs.pop(run, None)
                self._freed.pop(run, None)
            return self.nbytes

    @property
    def status(self) -> tuple[HeldStatus, ...]:
        """What is held, by run."""
        with self._lock:
            return tuple(
                HeldStatus(
                    run,
                    len(generations),
                    len(files := [file for one in generations.values() for file in one.values()]),
                    sum(file.nbytes for file in files),
                    max(file.step for file in files),
                )
                for run, generations in sorted(self._runs.items())
            )


class Holder(Listener):
    """Listens for senders and readers of pieces, each in a thread, until it is closed."""

    _name = "holder"
    _max_peers = 512

    def __init__(
        self, pieces: HeldPieces, address: NetworkAddress, token: bytes | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen at once. Raises as `Listener`."""
        self._pieces = pieces
        super().__init__(address, token, tls)

    def _answer(self, peer: socket.socket) -> None:
        while True:
            kind, body = wire.receive(peer, wire.MAX_STORE, IDLE_SECONDS)
            wire.send(peer, *self._answer_to(kind, body), SEND_SECONDS)

    def _answer_to(self, kind: FrameKind, body: bytearray) -> tuple[FrameKind, bytes | memoryview]:
        if kind is FrameKind.STORE:
            return FrameKind.STORED, _json({"nbytes": self._pieces.store(*piece_requests.parse_piece(body))})
        if kind is FrameKind.FETCH:
            name = piece_requests.parse_name(piece_requests.parse_request(body, {}))
            return FrameKind.VALUES, memoryview(self._pieces.fetch(name))
        if kind is FrameKind.LIST:
            fields = piece_requests.parse_request(body, {})
            run = fields.get("run")
            if run is None:
                return FrameKind.HELD, _json(self._status())
            return FrameKind.HELD, piece_requests.dump_run(
                self._pieces.run(str(run), fields.get("pieces", True) is True)
            )
        if kind is FrameKind.DROP:
            fields = piece_requests.parse_request(body, {"run": str, "before": int})
            return FrameKind.STORED, _json({"nbytes": self._pieces.drop(fields["run"], fields["before"])})
        raise CorruptError("not a request")

    def _status(self) -> dict[str, Any]:
        runs = [asdict(one) for one in self._pieces.status]
        return {"memory": self._pieces.memory, "nbytes": self._pieces.nbytes, "runs": runs}


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()
