"""A run in the memory of other hosts: `peers://HOST:PORT,HOST:PORT/RUN`. Nothing that a holder sends is believed.

Each piece is compared with the hash that its sender computed. If it does not fit, or if its holder does not answer,
another holder is asked, then parity gives it, then the fallback: a folder or URL of the chain.
"""

import json
import random
import re
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Lock
from typing import Any, TypeVar

import numpy as np

from ckpt_codecs.base import Array
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, InvalidArgumentError, NotFoundError
from ckpt_formats.core.files import read_range
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores import parity_requests, piece_requests
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.listed_store import ListedStore, StoredObject
from ckpt_formats.stores.parity_pieces import ParityRow, PieceInParity, PiecesInParity, computed, rows_of
from ckpt_formats.stores.parity_requests import ColumnPiece, HeldParity
from ckpt_formats.stores.piece_ahead import PieceAhead
from ckpt_formats.stores.piece_requests import HELD_FILES, HeldFile, HeldRun, PieceName
from ckpt_formats.stores.wire import parse_addresses

T = TypeVar("T")

SCHEME = "peers"
CHAIN, LAYOUT, LOG = "chain.json", "layout.json", ".ckg"
_PACK = re.compile(r"[^/]+/packs/\d+\.safetensors")
_SECONDS = 20.0
"""How long a holder may take for a connection, or an answer, before another is asked."""
_BUSY_SECONDS = 5.0
"""How long to try again if a holder ends a connection before it greets."""
_STEP = 16 << 20
"""Bytes of a long read that are waited for at once."""
_HEADER = 1 << 14
"""Bytes up to which a read may be that of a header, after which reads go on elsewhere."""
_CONNECTIONS = 4
"""Connections of a reader to a holder, which lets in some hundred: all ranks of a job may read at the same time."""
_MAX_DAMAGED = 1000
"""How many pieces that did not fit are remembered."""
_OTHERS = 128
"""Pieces that are in memory because others are computed from them."""
_REFRESHES = 8
"""How often to ask again what holders have, if a parity has changed meanwhile."""
_HINT = "Start `ckpt hold` there, or name other hosts; --from names another copy of the chain."


@dataclass(frozen=True)
class HolderAnswer:
    """What one of the holders has of a run, or why it does not answer."""

    address: NetworkAddress
    run: HeldRun
    error: CkptError | None = None
    parities: tuple[HeldParity, ...] = ()


@dataclass(frozen=True)
class DamagedPiece:
    """A piece that a holder has not as it was sent."""

    holder: str
    file: str
    offset: int
    is_parity: bool = False
    """Whether it has a parity that does not give the piece as it was sent."""


class _ParityChanged(Exception):
    """A parity has pieces that were not listed when the holders were asked."""


class _HeldGeneration:
    """What holders that answer have of a generation."""

    def __init__(self, generation: str, answers: Sequence[HolderAnswer]) -> None:
        self._sources: dict[str, list[tuple[NetworkAddress, HeldFile, list[int]]]] = {}
        """By file: its holders, what they have, and where each piece begins."""
        for answer in answers:
            for name, file in answer.run.get(generation, {}).items():
                starts = list(accumulate((nbytes for nbytes, _ in file.pieces), initial=0))
                self._sources.setdefault(name, []).append((answer.address, file, starts))
        self.parity = PiecesInParity(
            [
                (answer.address, one)
                for answer in answers
                for one in answer.parities
                if one.name.generation == generation
            ]
        )

    def holders(self, name: str, offset: int, nbytes: int) -> Iterator[tuple[NetworkAddress, str]]:
        """Who has a piece, and its hash there."""
        for address, file, starts in self._sources.get(name, ()):
            at = bisect_left(starts, offset)
            if at < len(file.pieces) and starts[at] == offset and file.pieces[at][0] == nbytes:
                yield address, file.pieces[at][1]


class PeersStore(ListedStore):
    """A generation of a run, as several holders have it together. Threads may share it.

    Attributes:
        nbytes_from: The bytes that were read from each holder, and from the fallback.
        nbytes_computed: The bytes that nobody had any more, and that were computed from parity.
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
        self._starts: dict[str, list[int]] = {}
        """Where each piece of a file begins, and the last one ends."""
        for answer in answers:
            for name, file in answer.run.get(generation, {}).items():
                known = self._files.get(name)
                if known is None or (file.step, file.nbytes) > (known.step, known.nbytes):
                    self._files[name] = file
        self._generation_known = _HeldGeneration(generation, answers)
        self.nbytes_from: Counter[str] = Counter()
        self.nbytes_computed = 0
        self.damaged: set[DamagedPiece] = set()
        self.silent: dict[str, str] = {
            str(answer.address): answer.error.what for answer in answers if answer.error is not None
        }
        for name, file in self._generation_known.parity.files(self._is_lost):
            known = self._files.get(name)
            if known is None or (file.step, file.nbytes) > (known.step, known.nbytes):
                self._files[name] = file
        objects = {}
        for name, file in self._files.items():
            starts = list(accumulate((nbytes for nbytes, _ in file.pieces), initial=0))
            self._starts[name] = starts
            tag = piece_requests.digest_of(repr(file.pieces).encode())
            if name == HELD_FILES:
                continue
            objects[f"{run}/{name}"] = StoredObject(starts[-1], tag, 0.0)
        addresses = ",".join(str(answer.address) for answer in answers)
        super().__init__(f"{SCHEME}://{addresses}", objects, run)
        self._turns = {answer.address: BoundedSemaphore(_CONNECTIONS) for answer in answers}
        self._connections = {answer.address: SimpleQueue[Connection]() for answer in answers}
        weakref.finalize(self, _close_all, tuple(self._connections.values()))
        self._ahead_of_pieces = PieceAhead(self._fetched)
        self._others: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._lock_of_counts, self._lock_of_held = Lock(), Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._run, self._generation, self._answers, self._fallback, self.notices)

    @property
    def is_whole(self) -> bool:
        """Whether a restore can begin: the list of the chain is held, and of every rank the start of the log, or all of
        its file of a save.
        """
        files = self.files_of_ranks.values()
        is_started = bool(files) and all(file.starts and file.world == len(files) for file in files)
        return CHAIN in self._files and is_started and self._has_base

    @property
    def missing(self) -> int:
        """How many of the files are missing with which a restore begins: of each rank one, the list, and the base."""
        world = max((file.world for file in self._files.values()), default=0)
        started = sum(file.starts for file in self.files_of_ranks.values())
        return world - started + (CHAIN not in self._files) + (not self._has_base)

    @property
    def _has_base(self) -> bool:
        """Whether all files of the base are there that several ranks have sent."""
        if HELD_FILES not in self._files:
            return True
        try:
            pieces = range(len(self._files[HELD_FILES].pieces))
            sizes = json.loads(b"".join(self._piece(HELD_FILES, number) for number in pieces))["files"]
            return all(
                not nbytes or (name in self._files and self._files[name].nbytes == nbytes)
                for name, nbytes in sizes.items()
            )
        except (CkptError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False

    @property
    def step(self) -> int:
        """The last step that is held of all ranks."""
        return min((file.step for file in self.files_of_ranks.values()), default=-1)

    @property
    def created(self) -> int:
        """When the generation began, as its ranks say: nanoseconds since 1970."""
        return min((file.created for file in self._files.values()), default=0)

    @property
    def last_step(self) -> int:
        """The last step that is held of any rank."""
        return max((file.step for file in self.files_of_ranks.values()), default=-1)

    @property
    def files_of_ranks(self) -> Mapping[str, HeldFile]:
        """The file of each rank: its log, or its pack of a save, which has no logs, nor a base that ranks share."""
        logs = {name: file for name, file in self._files.items() if name.endswith(LOG)}
        if logs or HELD_FILES in self._files:
            return logs
        return {name: file for name, file in self._files.items() if _PACK.fullmatch(name) is not None}

    def level(self, key: str) -> tuple[Mapping[str, StoredObject], list[str]]:
        """Nothing is known of what lies around the run."""
        return {}, []

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of a file. Raises `IncompleteError` if nobody has a piece of it as it was sent."""
        content = bytearray(nbytes)
        self.read_into(key, offset, memoryview(content))
        return memoryview(content)

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        """Fill `view` from byte `offset` on of a file. Returns the bytes that there are. Raises as `get`."""
        name, stop = self._name(key), min(offset + len(view), self._objects[key].nbytes)
        starts = self._starts[name]
        for begin in range(offset, stop, _STEP):
            end = min(begin + _STEP, stop)
            numbers, goes_on = _numbers(starts, begin, end), end - begin > _HEADER
            pieces = self._ahead_of_pieces.request(name, numbers, starts, goes_on=goes_on)
            for number, piece in zip(numbers, pieces, strict=True):
                data, start = self._ahead_of_pieces.result(name, number, piece), starts[number]
                low, high = max(begin, start), min(end, start + len(data))
                view[low - offset : high - offset] = data[low - start : high - start]
        return max(0, stop - offset)

    def request(self, key: str, offset: int, nbytes: int) -> None:
        name, stop = self._name(key), min(offset + nbytes, self._objects[key].nbytes)
        if offset < stop:
            starts = self._starts[name]
            self._ahead_of_pieces.request(name, _numbers(starts, offset, stop)[:1], starts)

    def has(self, key: str, offset: int, nbytes: int) -> bool:
        name = self._name(key)
        return self._ahead_of_pieces.has(name, _numbers(self._starts[name], offset, offset + nbytes))

    def keep(self, nbytes: int) -> None:
        self._ahead_of_pieces.limit(nbytes)

    def _name(self, key: str) -> str:
        """The name of a file in the generation."""
        return key[len(self._run) + 1 :]

    def _piece(self, name: str, number: int) -> memoryview:
        """A piece that fits its hash. Threads that need it at the same time share one request."""
        numbers = range(number, number + 1)
        (piece,) = self._ahead_of_pieces.request(name, numbers, self._starts[name])
        return self._ahead_of_pieces.result(name, number, piece)

    def _fetched(self, name: str, number: int) -> memoryview:
        start, end = self._starts[name][number : number + 2]
        digest = self._files[name].pieces[number][1]
        digests = {digest}
        for address, own_digest in self._generation_known.holders(name, start, end - start):
            if name == CHAIN and own_digest != digest:
                continue  # an older list
            # A bit may also flip in the list of hashes: those of another holder tell then.
            digests.add(own_digest)
            content = self._from_holder(address, own_digest, name, start, end - start)
            if content is not None:
                return memoryview(content)
        computed = self._computed_now(name, start, end - start, digests)
        if computed is not None:
            return computed
        if self._fallback is not None:
            with suppress(CkptError, OSError):
                other = read_range(self._fallback / name, start, end - start)
                if piece_requests.digest_of(other) in digests:
                    self._count(str(self._fallback), len(other))
                    return memoryview(other)
        raise IncompleteError(
            f"no holder that answers has the bytes {start} to {end} of {name} as they were sent",
            where=f"{self.url}/{self._run}",
            hint=_HINT,
        )

    def _from_holder(
        self, address: NetworkAddress, digest: str, name: str, start: int, nbytes: int
    ) -> bytearray | None:
        """A piece from a holder; None if it does not answer, or does not have it with this hash."""
        if str(address) in self.silent:
            return None
        piece = PieceName(self._run, self._generation, name, start)
        try:
            content = self._request(address, lambda connection: piece_requests.fetch(connection, piece))
        except (CorruptError, NotFoundError):
            return None
        except CkptError as error:
            self.silent[str(address)] = error.what
            return None
        if len(content) == nbytes and piece_requests.digest_of(content) == digest:
            self._count(str(address), nbytes)
            return content
        self._note_damage(DamagedPiece(str(address), name, start))
        return None

    # Parity

    def _is_lost(self, piece: ColumnPiece) -> bool:
        """Whether no holder that answers has a piece, as far as is known."""
        return not any(
            digest == piece.digest
            and str(address) not in self.silent
            and DamagedPiece(str(address), piece.file, piece.offset) not in self.damaged
            for address, digest in self._generation_known.holders(piece.file, piece.offset, piece.nbytes)
        )

    def _computed_now(self, name: str, start: int, nbytes: int, digests: set[str]) -> memoryview | None:
        """A piece from parity, as the holders have it now; None if it cannot be computed."""
        for count in range(_REFRESHES + 1):
            known = self._generation_known
            try:
                for placed in known.parity.placed(name, start):
                    if placed.piece.nbytes == nbytes:
                        content = self._computed(placed, digests | {placed.piece.digest}, is_last=count == _REFRESHES)
                        if content is not None:
                            with self._lock_of_counts:
                                self.nbytes_computed += nbytes
                            return content.data
                return None
            except _ParityChanged:
                with self._lock_of_held:
                    if self._generation_known is known:
                        self._generation_known = _HeldGeneration(self._generation, self._asked_again())
        return None

    def _asked_again(self) -> list[HolderAnswer]:
        """What holders have now that have answered until now; of those that do not answer any more, what they had."""
        addresses = [one.address for one in self._answers if str(one.address) not in self.silent]
        now = {one.address: one for one in (_ask_all(addresses, self._run) if addresses else [])}
        return [
            now[one.address] if one.address in now and now[one.address].error is None else one for one in self._answers
        ]

    def _computed(self, placed: PieceInParity, digests: set[str], is_last: bool) -> Array | None:
        """`is_last`: a parity that has changed is left out, not asked for again. Raises `_ParityChanged`."""
        missing, failed = set[ColumnPiece](), list[list[ParityRow]]()

        def is_lost(piece: ColumnPiece) -> bool:
            return piece in missing or self._is_lost(piece)

        while True:
            count = len(missing)
            for sections in placed.set.choices(placed.column, placed.piece, is_lost):
                rows = rows_of(sections)
                sums = {row.name: self._sum(row, placed.piece, is_last) for row in rows}
                others = dict[tuple[str, int], Array]()
                for other in (one for section in sections for one, _ in section.others):
                    content = self._other(other)
                    if content is None:
                        missing.add(other)
                        break
                    others[other.file, other.offset] = content
                if len(missing) > count:
                    break
                there = {name: content for name, content in sums.items() if content is not None}
                if len(there) < len(rows):
                    continue
                result = computed(placed.piece, sections, there, others)
                if piece_requests.digest_of(result.data) in digests:
                    self._note_parities(placed, [row for own in failed for row in own if row not in rows])
                    return result
                failed.append(rows)
            if len(missing) == count:
                self._note_parities(placed, [row for own in failed for row in own])
                return None

    def _note_parities(self, placed: PieceInParity, rows: Sequence[ParityRow]) -> None:
        for row in rows:
            self._note_damage(DamagedPiece(str(row.address), placed.piece.file, placed.piece.offset, True))

    def _sum(self, row: ParityRow, piece: ColumnPiece, is_last: bool) -> Array | None:
        """The bytes of a parity where a piece is; None if its holder does not give them. Raises `_ParityChanged`."""
        if str(row.address) in self.silent:
            return None
        try:
            ends, content = self._request(
                row.address,
                lambda connection: parity_requests.fetch_sum(connection, row.name, piece.at, piece.nbytes),
            )
        except (CorruptError, NotFoundError):
            return None
        except CkptError as error:
            self.silent[str(row.address)] = error.what
            return None
        if not row.knows(ends, piece.at, piece.at + piece.nbytes):
            if is_last:
                return None
            raise _ParityChanged
        self._count(str(row.address), len(content))
        return np.frombuffer(content, np.uint8)

    def _other(self, piece: ColumnPiece) -> Array | None:
        """A piece that a holder has, for those that are computed from it; None if nobody gives it as it was sent."""
        key = (piece.file, piece.offset)
        with self._lock_of_counts:
            if key in self._others:
                self._others.move_to_end(key)
                return self._others[key]
        for address, digest in self._generation_known.holders(piece.file, piece.offset, piece.nbytes):
            if digest == piece.digest:
                content = self._from_holder(address, digest, piece.file, piece.offset, piece.nbytes)
                if content is not None:
                    values = np.frombuffer(content, np.uint8)
                    with self._lock_of_counts:
                        self._others[key] = values
                        while len(self._others) > _OTHERS:
                            self._others.popitem(last=False)
                    return values
        return None

    def _count(self, source: str, nbytes: int) -> None:
        with self._lock_of_counts:
            self.nbytes_from[source] += nbytes

    def _note_damage(self, piece: DamagedPiece) -> None:
        with self._lock_of_counts:
            if len(self.damaged) < _MAX_DAMAGED:
                self.damaged.add(piece)

    def _request(self, address: NetworkAddress, ask: Callable[[Connection], T]) -> T:
        """What a holder answers, through a connection that no other thread uses meanwhile."""
        with self._turns[address]:
            try:
                connection = self._connections[address].get_nowait()
            except Empty:
                return self._ask(address, self._connected(address), ask)
            with suppress(IncompleteError):  # the holder ends connections that are not used for long
                return self._ask(address, connection, ask)
            return self._ask(address, self._connected(address), ask)

    def _connected(self, address: NetworkAddress) -> Connection:
        try:
            return _connect(address, Credentials.of_user())
        except NotFoundError as error:  # unlike a piece that a holder has no longer
            raise IncompleteError(error.what, where=error.where) from None

    def _ask(self, address: NetworkAddress, connection: Connection, ask: Callable[[Connection], T]) -> T:
        try:
            answer = ask(connection)
        except BaseException:
            connection.close()
            raise
        self._connections[address].put(connection)
        return answer


def _numbers(starts: Sequence[int], begin: int, end: int) -> range:
    """The pieces that have bytes of a range. `starts`: where each begins."""
    return range(max(bisect_right(starts, begin) - 1, 0), bisect_left(starts, end))


def is_recorded(generation: str, answers: Collection[HolderAnswer]) -> bool:
    """Whether what holders have of a generation is of a recorded run, and of no save."""
    files = {name for answer in answers for name in answer.run.get(generation, ())}
    for parity in (one for answer in answers for one in answer.parities if one.name.generation == generation):
        files |= {piece.file for column in parity.columns.values() for piece in column.pieces}
    return any(name.endswith((LOG, f"/{LAYOUT}")) or name == HELD_FILES for name in files)


def _connect(address: NetworkAddress, credentials: Credentials) -> Connection:
    """Connect to a holder. It ends connections at once while it has too many: then try again for some seconds.

    Raises as `Connection`.
    """
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return Connection(address, credentials, "holder", _SECONDS)
        except IncompleteError:
            if time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.1, 0.5))


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
    answers = _ask_all(parse_addresses(hosts), run)
    errors = [answer.error for answer in answers if answer.error is not None]
    if len(errors) == len(answers):
        raise errors[0]
    generations = {one for answer in answers for one in answer.run}
    generations |= {one.name.generation for answer in answers for one in answer.parities}
    if not generations:
        raise NotFoundError(f"no holder that answers has a run {run}", where=url, hint=_HINT)
    return StorePath(_newest_whole(run, generations, answers, fallback, url), key)


def _ask_all(addresses: Sequence[NetworkAddress], run: str) -> list[HolderAnswer]:
    """What all holders have of a run, or why they do not answer."""
    credentials = Credentials.of_user()

    def ask(address: NetworkAddress) -> HolderAnswer:
        try:
            with closing(_connect(address, credentials)) as connection:
                parities = parity_requests.list_parities(connection, run)
                return HolderAnswer(address, piece_requests.list_run(connection, run), parities=parities)
        except CkptError as error:
            return HolderAnswer(address, {}, error)

    with ThreadPoolExecutor(min(len(addresses), 32)) as pool:
        return list(pool.map(ask, addresses))


def _newest_whole(
    run: str, generations: set[str], answers: Sequence[HolderAnswer], fallback: Path | None, url: str
) -> PeersStore:
    """The generation that began last, of those from which a replay can begin.

    An older one may reach a later step: the run went back, or another run of this name was before it.
    """
    stores = {one: PeersStore(run, one, answers, fallback, ()) for one in generations}
    whole = [one for one, store in stores.items() if store.is_whole]
    if not whole:
        raise IncompleteError(
            f"the holders that answer do not have all ranks of {run}, nor its list {CHAIN}", where=url, hint=_HINT
        )
    best = max(whole, key=lambda one: (stores[one].created, stores[one].step))
    step, notices = stores[best].step, []
    parts = max(store.last_step for store in stores.values() if store.created >= stores[best].created)
    if parts > step:
        notices.append(f"the holders have parts of steps up to {parts}; the last whole one is step {step}")
    older = max(stores[one].step for one in whole)
    if older > step:
        notices.append(f"an older segment of {run} reaches step {older}; the newest one, which is read, step {step}")
    return PeersStore(run, best, answers, fallback, notices) if notices else stores[best]
