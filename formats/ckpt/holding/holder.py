"""Hold pieces of runs in the memory of this process, for as long as it lives: `ckpt hold`.

The memory is anonymous, not a folder in /dev/shm: it has no name that another program could read, change or remove,
and nothing of it stays when the process is killed.
"""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt.holding.block_check import BLOCK_NBYTES
from ckpt.holding.parity_buffer import ParityBuffer
from ckpt.shadow.listener import Listener
from ckpt_formats.core.errors import CorruptError, IncompleteError, NoSpaceError, NotFoundError, UnsupportedError
from ckpt_formats.core.text import format_nbytes
from ckpt_formats.stores import parity_requests, piece_requests, wire
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.parity_requests import HeldParity, ParityName, ParityPlace
from ckpt_formats.stores.piece_requests import HeldFile, HeldRun, HeldStatus, PieceName, SentPiece
from ckpt_formats.stores.wire import FrameKind

IDLE_SECONDS = 3600.0
"""How long a peer may stay without a request."""
SEND_SECONDS = 60.0
"""The time in which a peer must take an answer."""
PIECE_OVERHEAD = 1024
"""The bytes that a piece counts besides its own: its hash, its place, and what Python needs for it."""


SCRUB_SECONDS, SCRUB_PAUSE = 0.01, 60.0
"""How long to wait after each MiB that was compared with its hash, and before all are compared again."""


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


@dataclass(frozen=True)
class DamagedPart:
    """A part of what is held that is not in memory as it was sent, or added."""

    run: str
    generation: str
    what: str
    """The file, or the parity."""
    offset: int


class HeldPieces:
    """Pieces in memory, at most so many bytes. Threads may share it."""

    def __init__(self, memory: int) -> None:
        """`memory`: the maximum number of bytes."""
        self.memory, self.nbytes = memory, 0
        self._runs: dict[str, dict[str, dict[str, _FileInMemory]]] = {}
        self._parities: dict[str, dict[str, dict[tuple[int, ...], ParityBuffer]]] = {}
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
            self._check_age(piece)
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
            self._check_memory(needed)
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

    def add(self, place: ParityPlace, piece: SentPiece, content: bytearray) -> int:
        """Add a piece to a parity, or mark its column. Returns the bytes that are held.

        A piece that was added already changes nothing. Raises `CorruptError` if another one is in its place,
        `IncompleteError` if the one before it is missing, and `NoSpaceError` and `UnsupportedError` as `store`.
        """
        name = place.parity
        with self._lock:
            self._check_age(piece)
            key = (*name.set_key[:3], name.row)
            buffer = self._parities.get(name.run, {}).get(name.generation, {}).get(key) or ParityBuffer(name)
            if buffer.is_new(place, piece, len(content)):
                entries = buffer.new_entries(place, len(content))
                needed = self.nbytes + buffer.growth(place.at, len(content)) + PIECE_OVERHEAD * entries
                self._check_memory(needed)
                buffer.add(place, piece, content)
                self._parities.setdefault(name.run, {}).setdefault(name.generation, {})[key] = buffer
                self.nbytes = needed
            return self.nbytes

    def _check_age(self, piece: SentPiece) -> None:
        if piece.created < self._freed.get(piece.name.run, 0):
            raise UnsupportedError("a newer segment of a run of this name is held, so this one was freed")

    def _check_memory(self, needed: int) -> None:
        if needed > self.memory:
            raise NoSpaceError(
                f"the holder may use {format_nbytes(self.memory)}, and would need {format_nbytes(needed)}",
                hint="Start it with more --memory, or store bases more often: the log before them is freed. "
                "`ckpt hold --free` frees runs that have ended.",
            )

    def parities(self, run: str, with_pieces: bool = True) -> list[HeldParity]:
        """All parities of a run, each column with all its pieces, or with none."""
        with self._lock:
            return [
                buffer.listing(with_pieces)
                for buffers in self._parities.get(run, {}).values()
                for buffer in buffers.values()
            ]

    def sum(self, name: ParityName, offset: int, nbytes: int) -> tuple[list[int], bytearray]:
        """Where the columns of a parity end, and bytes of it, as they are in memory now. Raises `NotFoundError`."""
        with self._lock:
            buffer = self._parities.get(name.run, {}).get(name.generation, {}).get((*name.set_key[:3], name.row))
            if buffer is None:
                raise NotFoundError("this parity is not held", where=name.run)
            return buffer.read(offset, nbytes)

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

    def drop(self, run: str, before: int, names: Collection[str] = ()) -> int:
        """Free the generations of a run that began before this time, and those of these names.

        Returns the bytes that are held now.
        """
        with self._lock:
            generations, parities = self._runs.get(run, {}), self._parities.get(run, {})
            for one in {*generations, *parities}:
                files, buffers = generations.get(one, {}), parities.get(one, {})
                parts: list[_FileInMemory | ParityBuffer] = [*files.values(), *buffers.values()]
                if one in names or all(part.created < before for part in parts):
                    self.nbytes -= sum(file.counted for file in generations.pop(one, {}).values())
                    self.nbytes -= sum(_counted(buffer) for buffer in parities.pop(one, {}).values())
            if generations or parities:
                self._freed[run] = max(before, self._freed.get(run, 0))
            else:
                self._freed.pop(run, None)
            for runs, own in ((self._runs, generations), (self._parities, parities)):
                if not own:
                    runs.pop(run, None)
            return self.nbytes

    def scrub(self) -> Iterator[DamagedPart | None]:
        """Compare all that is in memory with its hashes: yields each part that is damaged, and None after each MiB.

        What is freed meanwhile is held no longer, so it takes no memory beside what comes in its place.
        """
        with self._lock:
            files = [
                (run, generation, name)
                for run, generations in self._runs.items()
                for generation, own in generations.items()
                for name in own
            ]
            parities = [
                (run, generation, key, block)
                for run, generations in self._parities.items()
                for generation, buffers in generations.items()
                for key, buffer in buffers.items()
                for block in buffer.blocks
            ]
        compared = 0
        for run, generation, name in files:
            number = offset = 0
            while (part := self._compared(run, generation, name, number)) is not None:
                nbytes, is_damaged = part
                if is_damaged:
                    yield DamagedPart(run, generation, name, offset)
                number, offset, compared = number + 1, offset + nbytes, compared + nbytes + PIECE_OVERHEAD
                if compared >= BLOCK_NBYTES:
                    compared = 0
                    yield None
        for run, generation, key, block in parities:
            what = self._damaged_parity(run, generation, key, block)
            yield None if what is None else DamagedPart(run, generation, what, block * BLOCK_NBYTES)

    def _compared(self, run: str, generation: str, name: str, number: int) -> tuple[int, bool] | None:
        """The size of a piece, and whether it is damaged; None if there is none of this number."""
        with self._lock:
            file = self._runs.get(run, {}).get(generation, {}).get(name)
            if file is None or number >= len(file.pieces):
                return None
            content, digest = file.pieces[number], file.digests[number]
        return len(content), piece_requests.digest_of(content) != digest

    def _damaged_parity(self, run: str, generation: str, key: tuple[int, ...], block: int) -> str | None:
        """The parity whose block is damaged; None if it is not."""
        with self._lock:  # nothing is added meanwhile
            buffer = self._parities.get(run, {}).get(generation, {}).get(key)
            return buffer.name.text if buffer is not None and buffer.is_damaged(block) else None

    @property
    def status(self) -> tuple[HeldStatus, ...]:
        """What is held, by run."""
        with self._lock:
            return tuple(self._status_of(run) for run in sorted({*self._runs, *self._parities}))

    def _status_of(self, run: str) -> HeldStatus:
        generations, parities = self._runs.get(run, {}), self._parities.get(run, {})
        files = [file for one in generations.values() for file in one.values()]
        buffers = [buffer for one in parities.values() for buffer in one.values()]
        parts: list[_FileInMemory | ParityBuffer] = [*files, *buffers]
        return HeldStatus(
            run,
            len({*generations, *parities}),
            len(files),
            sum(file.nbytes for file in files),
            sum(buffer.nbytes for buffer in buffers),
            max(part.step for part in parts),
        )


def _counted(buffer: ParityBuffer) -> int:
    """The bytes that a parity takes of the memory."""
    return buffer.nbytes + buffer.check_nbytes + PIECE_OVERHEAD * buffer.entries


def scrub_until(stop: threading.Event, pieces: HeldPieces, report: Callable[[DamagedPart], None]) -> None:
    """Compare what is held with its hashes, again and again, and report each part that is damaged once."""
    known = set[DamagedPart]()
    while not stop.wait(SCRUB_PAUSE):
        for part in pieces.scrub():
            if part is not None and part not in known:
                known.add(part)
                report(part)
            if stop.wait(SCRUB_SECONDS):
                return


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
            fields = piece_requests.parse_request(body, {"run": str, "before": int, "names": list})
            nbytes = self._pieces.drop(fields["run"], fields["before"], fields["names"])
            return FrameKind.STORED, _json({"nbytes": nbytes})
        if kind is FrameKind.ADD:
            return FrameKind.STORED, _json({"nbytes": self._pieces.add(*parity_requests.parse_added(body))})
        if kind is FrameKind.PARITIES:
            fields = piece_requests.parse_request(body, {"run": str, "pieces": bool})
            return FrameKind.HELD, parity_requests.dump_parities(self._pieces.parities(fields["run"], fields["pieces"]))
        if kind is FrameKind.SUM:
            return FrameKind.VALUES, parity_requests.dump_sum(*self._pieces.sum(*parity_requests.parse_sum(body)))
        raise CorruptError("not a request")

    def _status(self) -> dict[str, Any]:
        runs = [asdict(one) for one in self._pieces.status]
        return {"memory": self._pieces.memory, "nbytes": self._pieces.nbytes, "runs": runs}


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()
