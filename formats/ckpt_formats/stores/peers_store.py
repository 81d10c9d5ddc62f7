"""A run in the memory of other hosts: `peers://HOST:PORT,HOST:PORT/RUN`. Nothing that a holder sends is believed.

Each piece is compared with the hash that its sender computed. If it does not fit, or if its holder does not answer,
another holder is asked, then the fallback: a folder or URL of the chain.
"""

import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, InvalidArgumentError, NotFoundError
from ckpt_formats.core.files import read_range
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores import piece_requests
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.listed_store import ListedStore, StoredObject
from ckpt_formats.stores.piece_requests import HeldFile, HeldRun, PieceName
from ckpt_formats.stores.wire import parse_addresses

SCHEME = "peers"
CHAIN, LOG = "chain.json", ".ckg"
_SECONDS = 20.0
"""How long a holder may take for a connection, or an answer, before another is asked."""
_RECENT = 32
"""Pieces that are in memory, since small reads share them."""
_MAX_DAMAGED = 1000
"""How many pieces that did not fit are remembered."""
_HINT = "Start `ckpt hold` there, or name other hosts; --from names another copy of the chain."


@dataclass(frozen=True)
class HolderAnswer:
    """What one of the holders has of a run, or why it does not answer."""

    address: NetworkAddress
    run: HeldRun
    error: CkptError | None = None


@dataclass(frozen=True)
class DamagedPiece:
    """A piece that a holder has not as it was sent."""

    holder: str
    file: str
    offset: int


class PeersStore(ListedStore):
    """A generation of a run, as several holders have it together. Threads may share it.

    Attributes:
        nbytes_from: The bytes that were read from each holder, and from the fallback.
        damaged: The pieces that did not fit their hash.
        silent: Why each holder that does not answer does not.
        notices: What the reader should know of the choice of the generation.
    """

    def __init__(
        self, run: str, generation: str, answers: Sequence[HolderAnswer], fallback: Path | None, notices: Sequence[str]
    ) -> None:
        self._answers, self._run, self._generation = tuple(answers), run, generation
        self._fallback, self.notices = fallback, tuple(notices)
        self._files: dict[str, HeldFile] = {}
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        for answer in answers:
            for name, file in answer.run.get(generation, {}).items():
                known = self._files.get(name)
                if known is None or (file.step, file.nbytes) > (known.step, known.nbytes):
                    self._files[name] = file
        objects = {}
        for name, file in self._files.items():
            starts, at = [], 0
            for nbytes, _ in file.pieces:
                starts.append((at, nbytes))
                at += nbytes
            self._pieces[name] = starts
            objects[f"{run}/{name}"] = StoredObject(at, piece_requests.digest_of(repr(file.pieces).encode()), 0.0)
        addresses = ",".join(str(answer.address) for answer in answers)
        super().__init__(f"{SCHEME}://{addresses}", objects, run)
        self._digests = {name: [digest for _, digest in file.pieces] for name, file in self._files.items()}
        self._connections = {answer.address: SimpleQueue[Connection]() for answer in answers}
        weakref.finalize(self, _close_all, tuple(self._connections.values()))
        self._recent: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._lock_of_recent = Lock()
        self.nbytes_from: Counter[str] = Counter()
        self.damaged: set[DamagedPiece] = set()
        self.silent: dict[str, str] = {
            str(answer.address): answer.error.what for answer in answers if answer.error is not None
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._run, self._generation, self._answers, self._fallback, self.notices)

    @property
    def is_whole(self) -> bool:
        """Whether a replay can begin: the list of the chain is held, and the start of the log of every rank."""
        logs = self._logs
        return CHAIN in self._files and bool(logs) and all(log.starts and log.world == len(logs) for log in logs)

    @property
    def step(self) -> int:
        """The last step that is held of all ranks."""
        return min((log.step for log in self._logs), default=-1)

    @property
    def last_step(self) -> int:
        """The last step that is held of any rank."""
        return max((log.step for log in self._logs), default=-1)

    @property
    def _logs(self) -> list[HeldFile]:
        return [file for name, file in self._files.items() if name.endswith(LOG)]

    def level(self, key: str) -> tuple[Mapping[str, StoredObject], list[str]]:
        """Nothing is known of what lies around the run."""
        return {}, []

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of a file. Raises `IncompleteError` if nobody has a piece of it as it was sent."""
        name = key[len(self._run) + 1 :]
        parts = [
            self._piece(name, number)[max(offset - start, 0) : offset + nbytes - start]
            for number, (start, size) in enumerate(self._pieces[name])
            if start < offset + nbytes and offset < start + size
        ]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _piece(self, name: str, number: int) -> memoryview:
        """A piece that fits its hash."""
        with self._lock_of_recent:
            if (name, number) in self._recent:
                self._recent.move_to_end((name, number))
                return self._recent[name, number]
        piece = memoryview(self._fetched(name, number))
        with self._lock_of_recent:
            self._recent[name, number] = piece
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        return piece

    def _fetched(self, name: str, number: int) -> bytes | bytearray | memoryview:
        start, nbytes = self._pieces[name][number]
        digest = self._digests[name][number]
        for answer in self._answers:
            file = answer.run.get(self._generation, {}).get(name)
            if file is None or len(file.pieces) <= number or str(answer.address) in self.silent:
                continue
            own_nbytes, own_digest = file.pieces[number]
            if own_nbytes != nbytes or (name == CHAIN and own_digest != digest):
                continue  # an older list
            try:
                content = self._request(answer.address, name, start)
            except CkptError as error:
                if not isinstance(error, (CorruptError, NotFoundError)):
                    self.silent[str(answer.address)] = error.what
                continue
            # A bit may also flip in the list of hashes: those of another holder tell then.
            if len(content) == nbytes and piece_requests.digest_of(content) == own_digest:
                self.nbytes_from[str(answer.address)] += nbytes
                return content
            self._note_damage(DamagedPiece(str(answer.address), name, start))
        if self._fallback is not None:
            with suppress(CkptError, OSError):
                other = read_range(self._fallback / name, start, nbytes)
                if piece_requests.digest_of(other) == digest:
                    self.nbytes_from[str(self._fallback)] += nbytes
                    return other
        raise IncompleteError(
            f"no holder that answers has the bytes {start} to {start + nbytes} of {name} as they were sent",
            where=f"{self.url}/{self._run}",
            hint=_HINT,
        )

    def _note_damage(self, piece: DamagedPiece) -> None:
        with self._lock_of_recent:
            if len(self.damaged) < _MAX_DAMAGED:
                self.damaged.add(piece)

    def _request(self, address: NetworkAddress, name: str, start: int) -> bytearray:
        """The bytes of a piece from a holder, through a connection that no other thread uses meanwhile."""
        free = self._connections[address]
        try:
            connection = free.get_nowait()
        except Empty:
            connection = Connection(address, Credentials.of_user(), "holder", _SECONDS)
        try:
            content = piece_requests.fetch(connection, PieceName(self._run, self._generation, name, start))
        except BaseException:
            connection.close()
            raise
        free.put(connection)
        return content


def _close_all(free: Sequence[SimpleQueue[Connection]]) -> None:
    for queue in free:
        with suppress(Empty):
            while True:
                queue.get_nowait().close()


def open_peers(url: str, fallback: Path | None = None) -> StorePath:
    """The path that `peers://HOST:PORT,HOST:PORT/RUN` names: a chain, or a step `RUN@STEP` of it.

    `fallback`: another copy of the chain, for pieces that no holder has.

    Raises `InvalidArgumentError`, `NotFoundError` if nobody answers, or nobody has the run, and `IncompleteError` if no
    generation of it is whole.
    """
    hosts, _, key = url.partition("://")[2].partition("/")
    key = key.rstrip("/")
    run = key.partition("/")[0].rpartition("@")[0] or key.partition("/")[0]
    if piece_requests.NAME.fullmatch(run) is None:
        raise InvalidArgumentError(
            "names no run", where=url, hint="Write peers://HOST:PORT,HOST:PORT/RUN, such as peers://a:7079/run.chain."
        )
    addresses, credentials = parse_addresses(hosts), Credentials.of_user()

    def ask(address: NetworkAddress) -> HolderAnswer:
        try:
            connection = Connection(address, credentials, "holder", _SECONDS)
            try:
                return HolderAnswer(address, piece_requests.list_run(connection, run))
            finally:
                connection.close()
        except CkptError as error:
            return HolderAnswer(address, {}, error)

    with ThreadPoolExecutor(min(len(addresses), 32)) as pool:
        answers = list(pool.map(ask, addresses))
    errors = [answer.error for answer in answers if answer.error is not None]
    if len(errors) == len(answers):
        raise errors[0]
    generations = {one for answer in answers for one in answer.run}
    if not generations:
        raise NotFoundError(f"no holder that answers has a run {run}", where=url, hint=_HINT)
    return StorePath(_newest_whole(run, generations, answers, fallback, url), key)


def _newest_whole(
    run: str, generations: set[str], answers: Sequence[HolderAnswer], fallback: Path | None, url: str
) -> PeersStore:
    """The generation with the last step, of those from which a replay can begin."""
    stores = {one: PeersStore(run, one, answers, fallback, ()) for one in generations}
    whole = [one for one, store in stores.items() if store.is_whole]
    if not whole:
        raise IncompleteError(
            f"the holders that answer do not have all ranks of {run}, nor its list {CHAIN}", where=url, hint=_HINT
        )
    best = max(whole, key=lambda one: stores[one].step)
    last = max(store.last_step for store in stores.values())
    if last <= stores[best].step:
        return stores[best]
    text = f"the holders have parts of steps up to {last}; the last whole one is step {stores[best].step}"
    return PeersStore(run, best, answers, fallback, (text,))
