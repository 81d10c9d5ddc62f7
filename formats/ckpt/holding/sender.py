"""Send what a rank records to the hosts that hold it: the sender never makes the run wait.

The files of the chain are the queue: what was not sent yet lies there. So a slow holder takes no memory, one that was
started again is filled from the start, and one that is gone only makes a line in the log of the trainer.

With parity, the rank's own host holds all pieces, and other hosts add them to parities:
`ckpt_formats.stores.parity_requests` has what is held then, and what is always true of it.
"""

import json
import os
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from pathlib import Path

from ckpt.holding.peers import HELD, Peers
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError
from ckpt_formats.parity.scheme import ParitySet
from ckpt_formats.stores import parity_requests, piece_requests, wire
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.parity_requests import HeldParity, ParityName, ParityPlace
from ckpt_formats.stores.peers_store import HolderAnswer, PeersStore, is_pack
from ckpt_formats.stores.piece_requests import HELD_FILES, HeldRun, PieceName, SentPiece
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps, Member
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.segment import rank_file

_SECONDS = 20.0
"""How long a holder may take for a connection, or an answer, before it counts as gone."""
_SOON, _LATE = 0.1, 5.0
"""Seconds from one try to reach a holder to the next: twice as long each time."""
_SMALL, _SMALL_SECONDS = 1 << 16, 0.1
"""Bytes up to which a piece is small, and how long the next one waits for more: each piece costs memory besides."""
_WITHOUT_BASE = "lacks a base that was removed from the chain before it was sent"
"""What is said of a holder, such as one that was started again, that has all else."""
_OWN_SECONDS = 0.02
"""How long a holder of parity waits until it is looked again whether the rank's own holder has a piece."""
_CHECK_SECONDS = 10.0
"""After so long without anything to send, a holder is asked whether it still has what it had."""
_LOOK_SECONDS = 0.5
"""From one look at the list of the chain to the next."""
_ASK_SECONDS, _PAUSE_EACH = 5.0, 0.1
"""How long rank 0 waits for a holder that it asks whether all is there, and how long for each before it asks again."""


@dataclass(eq=False)
class _SentFile:
    """A file that is sent, as far as it was cut into pieces."""

    path: Path
    nbytes: int
    """The bytes that may be sent."""
    is_small: bool = False
    """Whether hosts hold copies of it, also with parity."""
    content: bytes | None = None
    """All of a small file that is replaced by newer ones; its `version` counts them."""
    version: int = 0
    pieces: list[tuple[int, str]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where each piece begins."""
    placed: int = 0
    """How many pieces have a place in a stream."""
    cut: int = 0
    """Where the pieces end."""
    cut_at: float = 0.0
    """When the last one was cut."""
    ends: list[int] = field(default_factory=list)
    """Where records end after which a step is whole."""
    steps: list[int] = field(default_factory=list)
    start_end: int | None = None
    """Where that ends from which a replay begins: the first records of a log, or all of another file."""
    is_gone: bool = False
    """Whether it is in the chain no longer: what was not sent until then cannot be sent."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file. Raises `OSError` if it has fewer."""
        if self.content is not None:
            return self.content[offset : offset + nbytes]
        with self.path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), nbytes, offset)
        if len(content) != nbytes:
            raise OSError(f"{self.path.name} has become shorter")
        return content

    def cut_pieces(self, count: int, is_last: bool = True) -> None:
        """Cut what is new into pieces, until there are `count` of them. They are the same for all holders.

        `is_last`: no more bytes follow soon, so that a small piece need not wait for them.
        """
        while self.cut < self.nbytes and len(self.pieces) < count:
            nbytes = min(wire.CHUNK_NBYTES, self.nbytes - self.cut)
            if nbytes < _SMALL and not is_last and time.monotonic() < self.cut_at + _SMALL_SECONDS:
                return
            content = self.read(self.cut, nbytes)
            self.cut_at = time.monotonic()
            self.pieces.append((len(content), piece_requests.digest_of(content)))
            self.offsets.append(self.cut)
            self.cut += len(content)

    def step_at(self, end: int) -> int:
        """The last step that is whole with the bytes before this one."""
        at = bisect_right(self.ends, end)
        return self.steps[at - 1] if at else 0


@dataclass(frozen=True)
class _Contribution:
    """A piece that is added to parities."""

    name: str
    file: _SentFile
    number: int
    at: int
    """Where it begins in the stream."""


@dataclass(eq=False)
class _ColumnStream:
    """What a rank adds to the parities of a set."""

    set: ParitySet
    column: int
    contributions: list[_Contribution] = field(default_factory=list)
    nbytes: int = 0


@dataclass
class PeerState:
    """How far a holder is."""

    address: NetworkAddress
    text: str = ""
    """`HELD`, or why it has not what is recorded."""
    sent: int = 0
    """Bytes that were sent to it."""
    has_failed: bool = False
    """Whether the last try to reach it failed."""


@dataclass(eq=False)
class _Target:
    """A holder, what it should have, and what it has as far as the connection to it knows."""

    state: PeerState
    holds_all: bool
    """Whether it should have all pieces."""
    holds_small: bool
    """Whether it should have the small files, at least."""
    rows: tuple[tuple[_ColumnStream, int], ...]
    """The streams that it should add to parities, and which row it has of each."""
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By file, how many of its pieces it has, and which version."""
    added: dict[_ColumnStream, int] = field(default_factory=dict)
    """By stream, how many pieces were added."""
    marked: set[_ColumnStream] = field(default_factory=set)
    gapped: set[_ColumnStream] = field(default_factory=set)
    """The streams of which it has a gap: it has not all from which a replay begins."""
    has_base: bool = True
    """Whether it has all of the base that it should hold."""

    def should_have(self, file: _SentFile) -> bool:
        return self.holds_all or (self.holds_small and file.is_small)


@dataclass(frozen=True)
class SentGeneration:
    """What all ranks of a run send together: it is whole when the main file of each of them is."""

    run: str
    name: str
    created: int
    """When it began, in nanoseconds since 1970: the same for all ranks."""
    world: int
    main_file: Callable[[int], str]
    """The name of the file of a rank that every rank has."""
    step: int
    """The step at which it begins."""


class Sender:
    """Sends the files of a rank, each holder in a thread of its own.

    Attributes:
        states: How far each holder is.
        is_whole: Whether the holders that answer have the generation of all ranks; only rank 0's sender asks them.
    """

    def __init__(
        self,
        peers: Peers,
        generation: SentGeneration,
        rank: int,
        files: dict[str, _SentFile],
        say: Callable[[str, str], None],
    ) -> None:
        """Start at once. `say`: is called with the address of a holder and its state, when that changes.

        Raises `CkptError` if the user's credentials cannot be read.
        """
        self._peers, self._rank, self._say = peers, rank, say
        self._run, self._generation, self._created = generation.run, generation.name, generation.created
        self._world, self._main_file = generation.world, generation.main_file
        self._credentials = Credentials.of_user()
        self._main = generation.main_file(rank)
        self._files = files
        self._changed, self._is_closing, self._changes = threading.Condition(), False, 0
        self._is_abandoned = False
        self._cutting = threading.Lock()  # not `_changed`: the writer of the log never waits for a read of a file
        self._seen: tuple[int, ...] = ()  # the list of the chain, at the last look
        self.is_whole = False
        host = peers.host_of(rank, self._world)
        self._lane = peers.lane_of(rank, self._world)
        self._streams = [_ColumnStream(one, one.data.index(host)) for one in peers.sets_of(host)]
        self._starts: dict[_ColumnStream, int] | None = None
        self._shares: list[list[str]] = []
        """With parity, the files of the base that each rank sends."""
        self._targets = self._targets_of(host)
        self.states = tuple(one.state for one in self._targets)
        self._threads = [threading.Thread(target=self._send_all, args=(one,), daemon=True) for one in self._targets]
        if rank == 0:
            threading.Thread(target=self._free_others, daemon=True).start()
        for thread in self._threads:
            thread.start()

    def close(self, seconds: float) -> None:
        """Send what is missing, and end after so many seconds at the latest. A holder that fails is not waited for."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for state, thread in zip(self.states, self._threads, strict=True):
            while thread.is_alive() and not state.has_failed and time.monotonic() < deadline:
                thread.join(0.05)

    def abandon(self) -> None:
        """End without sending what is missing: each thread after the piece that it sends."""
        with self._changed:
            self._is_closing = self._is_abandoned = True
            self._changed.notify_all()

    def _targets_of(self, host: int) -> tuple[_Target, ...]:
        addresses, parities = self._peers.addresses, self._peers.parities_of(host)
        whole = [_Target(PeerState(addresses[one]), True, True, ()) for one in self._peers.holders_of(host)]
        return *whole, *(
            _Target(
                PeerState(addresses[one]),
                False,
                number < self._peers.parsed.spares,
                tuple(
                    (stream, stream.set.parities.index(one)) for stream in self._streams if one in stream.set.parities
                ),
            )
            for number, one in enumerate(parities)
        )

    # A thread for each holder

    def _note(self, state: PeerState, text: str) -> None:
        if state.text != text:
            state.text = text
            self._say(str(state.address), text)

    def _send_all(self, target: _Target) -> None:
        state, pause = target.state, _SOON
        while True:
            before = state.sent
            try:
                with closing(Connection(state.address, self._credentials, "holder", _SECONDS)) as connection:
                    target.counts = self._counts(piece_requests.list_run(connection, self._run))
                    target.added = dict.fromkeys((stream for stream, _ in target.rows), 0)
                    target.marked, target.gapped, target.has_base = set(), set(), True
                    if target.rows:
                        self._compare_added(target, parity_requests.list_parities(connection, self._run))
                    state.has_failed = False
                    while self._send_missing(connection, target):
                        pass
                return
            except Exception as error:  # a thread that ended would say no more, and its holder seem to hold all
                state.has_failed = True
                what = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
                self._note(state, error.what if isinstance(error, CkptError) else what)
            # A holder that only refuses, as one without memory does, lists all that it has each time.
            pause = _SOON if state.sent > before else min(2 * pause, _LATE)
            with self._changed:
                if self._is_closing:
                    return
                self._changed.wait_for(lambda: self._is_closing, pause)

    def _counts(self, run: HeldRun) -> dict[str, tuple[int, int]]:
        """By file, how many of its pieces a holder has, and which version. Raises `CorruptError` if it has others."""
        counts = {}
        for name, file in run.get(self._generation, {}).items():
            own = self._files.get(name)
            if own is None or own.content is not None:
                continue
            with self._cutting:
                self._cut(name, own, len(file.pieces))
                if list(file.pieces) != own.pieces[: len(file.pieces)]:
                    raise CorruptError("has other pieces of this run", where=name)
            counts[name] = (len(file.pieces), own.version)
        return counts

    def _compare_added(self, target: _Target, parities: Sequence[HeldParity]) -> None:
        """Note what a holder has added. Raises `CorruptError` if it has added something else."""
        known = {parity.name: parity.columns for parity in parities}
        for stream, row in target.rows:
            column = known.get(self._parity_of(stream, row), {}).get(stream.column)
            if column is None:
                continue
            at = 0
            with self._cutting:
                for piece in column.pieces:
                    while at < len(stream.contributions) and stream.contributions[at].at < piece.at:
                        at += 1  # a gap: it could not be read any more
                        target.gapped.add(stream)
                    one = stream.contributions[at] if at < len(stream.contributions) else None
                    if one is None or (one.name, one.at, *one.file.pieces[one.number]) != (
                        *(piece.file, piece.at),
                        *(piece.nbytes, piece.digest),
                    ):
                        raise CorruptError("has added other pieces of this run", where=piece.file)
                    at += 1
            target.added[stream] = at
            if column.is_marked:
                target.marked.add(stream)

    def _send_missing(self, connection: Connection, target: _Target) -> bool:
        """Send what a holder does not have. Returns whether the sender goes on; waits if there is nothing."""
        with self._changed:
            files, changes = list(self._files.items()), self._changes
        for name, file in files:
            while target.should_have(file) and (piece := self._next_piece(name, file, target)) is not None:
                if self._is_abandoned:
                    return False
                piece_requests.store(connection, *piece)
                count = 0 if piece[0].replaces else target.counts.get(name, (0, 0))[0]
                target.counts[name] = (count + 1, file.version)
                target.state.sent += len(piece[1])
        if target.rows and not self._add_missing(connection, target):
            with self._changed:
                self._changed.wait(_OWN_SECONDS)
            return True
        has_rest = any(
            file.cut < file.nbytes and not file.is_gone for _, file in files
        )  # a small piece that waits for more
        if has_rest:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, _SMALL_SECONDS)
            return True
        if self._changes != changes:
            return True
        self._note(target.state, HELD if target.has_base and not target.gapped else _WITHOUT_BASE)
        with self._changed:
            is_new = self._changed.wait_for(lambda: self._changes != changes or self._is_closing, _CHECK_SECONDS)
            if self._changes == changes and self._is_closing:
                return False
        if not is_new and not self._is_there(connection, target):
            raise IncompleteError("has lost what it had of this run")
        return True

    def _is_there(self, connection: Connection, target: _Target) -> bool:
        """Whether a holder still has something of what it had."""
        if target.counts:
            run = piece_requests.list_run(connection, self._run, with_pieces=False)
            if self._generation not in run:
                return False
        if not any(target.added.values()):
            return True
        parities = parity_requests.list_parities(connection, self._run, with_pieces=False)
        return any(one.name.generation == self._generation for one in parities)

    def _next_piece(self, name: str, file: _SentFile, target: _Target) -> tuple[SentPiece, bytes] | None:
        """The next piece that a holder does not have, and its bytes; None also if the chain has it no longer."""
        try:
            with self._cutting:
                count, version = target.counts.get(name, (0, 0))
                if file.content is not None and version != file.version:
                    count = 0
                self._cut(name, file, count + 1)
                if count >= len(file.pieces):
                    return None
            return self._sent(name, file, count)
        except OSError:
            # Copies follow the list of the chain to a newer base; until then it must not be sent without what it names.
            if not self._streams or not self._is_compacted(name, file):
                raise
            target.has_base = False
            return None

    def _sent(self, name: str, file: _SentFile, number: int) -> tuple[SentPiece, bytes]:
        """A piece, and its bytes. Raises `OSError` if they cannot be read any more."""
        with self._cutting:
            nbytes, digest = file.pieces[number]
            offset = file.offsets[number]
        end = offset + nbytes
        content = file.read(offset, nbytes)
        with self._changed:
            starts = file.start_end is not None and end >= file.start_end
            step = file.step_at(end)
        piece = PieceName(self._run, self._generation, name, offset)
        replaces = file.content is not None and not offset
        return SentPiece(piece, digest, step, starts, replaces, self._world, self._created), content

    def _is_compacted(self, name: str, file: _SentFile) -> bool:
        """Whether a file cannot be read because the chain was compacted since."""
        return False

    def _cut(self, name: str, file: _SentFile, count: int) -> None:
        """Cut a file into so many pieces, as far as they are there, and append each to the shortest stream.

        The caller holds `_cutting`: so all holders of parities have the same streams.
        """
        before = len(file.pieces)
        file.cut_pieces(count, is_last=self._is_closing or name != self._main)
        for number in range(file.placed, len(file.pieces) if self._streams and not file.is_small else 0):
            stream = min(self._streams, key=lambda one: one.nbytes)
            stream.contributions.append(_Contribution(name, file, number, stream.nbytes))
            stream.nbytes += file.pieces[number][0]
            file.placed = number + 1
        if len(file.pieces) > before:
            with self._changed:  # other threads may have looked just before
                self._changes += 1
                self._changed.notify_all()

    # Parity

    def _parity_of(self, stream: _ColumnStream, row: int) -> ParityName:
        scheme = self._peers.parsed
        numbers = (stream.set.group, stream.set.number, self._lane, row, scheme.data, scheme.spares)
        return ParityName(self._run, self._generation, *numbers)

    def _add_missing(self, connection: Connection, target: _Target) -> bool:
        """Let a holder add what it has not. Returns False if this waits for the rank's own holder."""
        has_base = bool(self._seen)
        with self._changed:
            files = list(self._files.items())
        while True:
            for stream, row in target.rows:
                while target.added[stream] < len(stream.contributions):
                    one = stream.contributions[target.added[stream]]
                    if not self._is_own(one):
                        return False
                    if not self._add(connection, target, stream, row, one):
                        target.gapped.add(stream)
                    target.added[stream] += 1
            if not self._cut_next(files):
                break
        with self._cutting:
            starts = self._find_starts(dict(files)) if has_base else None
        for stream, row in target.rows:
            is_new = stream not in target.marked and stream not in target.gapped
            if starts is not None and is_new and target.added[stream] >= starts[stream]:
                place = ParityPlace(self._parity_of(stream, row), stream.column, self._rank, 0)
                log = PieceName(self._run, self._generation, self._main, 0)
                mark = SentPiece(log, piece_requests.digest_of(b""), 0, False, False, self._world, self._created)
                parity_requests.add(connection, place, mark, b"")
                target.marked.add(stream)
        return True

    def _cut_next(self, files: Sequence[tuple[str, _SentFile]]) -> bool:
        """Cut one more piece of what is there, if there is one: other threads need not wait until all is read."""
        for name, file in files:
            if file.is_small or file.is_gone or file.cut >= file.nbytes:
                continue
            with self._cutting:
                count = len(file.pieces)
                try:
                    self._cut(name, file, count + 1)
                except OSError:
                    if not self._is_compacted(name, file):
                        raise
                if len(file.pieces) > count:
                    return True
        return False

    def _add(
        self, connection: Connection, target: _Target, stream: _ColumnStream, row: int, one: _Contribution
    ) -> bool:
        """Let a holder add a piece. Returns False if there is a gap, which counts as zeros: the chain was compacted."""
        try:
            piece, content = self._sent(one.name, one.file, one.number)
        except OSError:
            if not self._is_compacted(one.name, one.file):
                raise
            return False
        place = ParityPlace(self._parity_of(stream, row), stream.column, self._rank, one.at)
        parity_requests.add(connection, place, piece, content)
        target.state.sent += len(content)
        return True

    def _is_own(self, one: _Contribution) -> bool:
        """Whether the rank's own holder has a piece, or does not answer, or nobody can read the piece any more."""
        own = self._targets[0]
        return own.state.has_failed or one.file.is_gone or own.counts.get(one.name, (0, 0))[0] > one.number

    def _find_starts(self, files: Mapping[str, _SentFile]) -> dict[_ColumnStream, int] | None:
        """By stream, up to which piece it has that from which a replay begins; None if not all of that is there."""
        log = files[self._main]
        parts = [file for name, file in files.items() if not file.is_small and name != self._main]
        if self._starts is None and log.start_end is not None and log.cut >= log.start_end:
            if any(file.is_gone or file.cut < file.nbytes for file in parts):
                return None
            # Files of the base may come after records that are not part of the start.
            self._starts = {
                stream: max(
                    (
                        number
                        for number, one in enumerate(stream.contributions, 1)
                        if one.file is not log or log.offsets[one.number] < log.start_end
                    ),
                    default=0,
                )
                for stream in self._streams
            }
        return self._starts

    # Rank 0

    def _free_others(self) -> None:
        """Free what is older once all of this generation is held, each holder as soon as it answers."""
        unfreed = set(self._peers.addresses)
        while unfreed:
            time.sleep(max(_LOOK_SECONDS, _PAUSE_EACH * len(self._peers.addresses)))
            if not self.is_whole:
                self._look_at_holders()
            if self._is_closing:
                return
            if self.is_whole:
                unfreed -= {address for address in unfreed if self._free(address, self._created)}

    def _look_at_holders(self) -> None:
        """Note whether a replay can begin with what is held: each rank's start, by all holders of it that answer."""
        runs, parities = dict[NetworkAddress, HeldRun](), dict[NetworkAddress, dict[ParityName, HeldParity]]()
        for address in self._peers.addresses:
            if self._is_closing:
                return
            with suppress(CkptError), closing(Connection(address, self._credentials, "holder", _ASK_SECONDS)) as one:
                run = piece_requests.list_run(one, self._run, with_pieces=False)
                if self._peers.sets:
                    known = parity_requests.list_parities(one, self._run, with_pieces=False)
                    parities[address] = {parity.name: parity for parity in known}
                runs[address] = run
        self.is_whole = all(
            self._is_start_held(rank, runs) and self._is_start_added(rank, parities) for rank in range(self._world)
        )
        if not self.is_whole:
            self._make_room(runs)

    def _make_room(self, runs: Mapping[NetworkAddress, HeldRun]) -> None:
        """Free what is in the way of this generation. `runs`: what each holder that answers has."""

    def _is_start_held(self, rank: int, runs: Mapping[NetworkAddress, HeldRun]) -> bool:
        host = self._peers.host_of(rank, self._world)
        whole = self._peers.holders_of(host)
        names = [(self._main_file(rank), whole)]
        if self._shares:
            names += [(name, whole) for name in self._shares[rank]]
        if rank == 0:
            names.append((chain_file.NAME, (*whole, *self._peers.parities_of(host)[: self._peers.parsed.spares])))
        for name, hosts in names:
            addresses = [self._peers.addresses[one] for one in hosts]
            files = [runs[one].get(self._generation, {}).get(name) for one in addresses if one in runs]
            if not files and not (self._peers.sets and name != chain_file.NAME):
                return False
            if any(file is None or not file.starts for file in files):
                return False
        return True

    def _is_start_added(self, rank: int, parities: Mapping[NetworkAddress, Mapping[ParityName, HeldParity]]) -> bool:
        """Whether all parities of a rank that answer have its start, and those that do not may be lost."""
        host, lane = self._peers.host_of(rank, self._world), self._peers.lane_of(rank, self._world)
        for stream in (_ColumnStream(one, one.data.index(host)) for one in self._peers.sets_of(host)):
            silent = [
                one for one in (*stream.set.data, *stream.set.parities) if self._peers.addresses[one] not in parities
            ]
            if len(silent) > self._peers.parsed.spares:
                return False
            for row, one in enumerate(stream.set.parities):
                name = replace(self._parity_of(stream, row), lane=lane)
                if one not in silent:
                    parity = parities[self._peers.addresses[one]].get(name)
                    column = None if parity is None else parity.columns.get(stream.column)
                    if column is None or not column.is_marked:
                        return False
        return True

    def _free(self, address: NetworkAddress, before: int, names: Sequence[str] = ()) -> bool:
        """Free the generations in a holder that began before this time, and those of these names.

        Returns whether it answered.
        """
        with suppress(CkptError), closing(Connection(address, self._credentials, "holder", _ASK_SECONDS)) as one:
            piece_requests.drop(one, self._run, before, names)
            return True
        return False


class LogSender(Sender):
    """Sends the log of a rank, and rank 0's the list and the base of the chain."""

    def __init__(self, peers: Peers, segment: Path, rank: int, say: Callable[[str, str], None]) -> None:
        """Start at once. `segment`: the folder of the segment; `say`: as of `Sender`.

        Raises `CkptError` if the layout of the segment cannot be read.
        """
        layout = layouts.load(segment / layouts.NAME)
        self._segment = segment
        files: dict[str, _SentFile] = {}
        status = (segment / layouts.NAME).stat()
        if rank == 0:
            files[f"{segment.name}/{layouts.NAME}"] = _SentFile(segment / layouts.NAME, status.st_size, True)
        files[f"{segment.name}/{rank_file(rank)}"] = _SentFile(segment / rank_file(rank), 0)
        generation = SentGeneration(
            peers.run or segment.parent.name,
            layout.run,
            status.st_mtime_ns,
            len(layout.ranks),
            lambda rank: f"{segment.name}/{rank_file(rank)}",
            layout.first,
        )
        super().__init__(peers, generation, rank, files, say)
        if rank == 0 or self._streams:
            threading.Thread(target=self._follow_chain, daemon=True).start()

    def advance(self, nbytes: int, kind: Kind, step: int) -> None:
        """Note that the log has a further record, and ends there."""
        with self._changed:
            file = self._files[self._main]
            file.nbytes = nbytes
            if kind is Kind.FINGERPRINT and file.start_end is None:
                file.start_end = nbytes  # it follows the states at the start
            if kind is Kind.GRADIENTS or not file.ends:
                file.ends.append(nbytes)
                file.steps.append(step)
            self._changes += 1
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        if self._rank == 0 or self._streams:
            with suppress(CkptError, OSError):
                self._look_at_chain()
        super().close(seconds)

    def _follow_chain(self) -> None:
        """Send the list of the chain and its base as soon as they are there; with parity, all ranks send the base."""
        while not self._is_closing and not (self._streams and self._seen):
            with suppress(CkptError, OSError):
                self._look_at_chain()
            time.sleep(_LOOK_SECONDS)

    def _look_at_chain(self) -> None:
        """Take the list of the chain and the files of its base, if the list is another one than at the last look."""
        path = self._segment.parent / chain_file.NAME
        status = path.stat()
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        # With parity, no later base is sent: the log from the start is there, and a base would be held beside it.
        if seen == self._seen or (self._streams and self._seen):
            return
        chain = chain_file.load(path)
        logged = next((one for one in chain.segments if one.folder == self._segment.name), None)
        if logged is None or logged.run != self._generation:
            return
        members = self._base_of(chain, logged)
        if logged.parent is not None and not members:
            return  # nothing from which a replay can begin
        names = sorted(chain.folders_of(members[-1])) if members else []
        paths = [path for name in names for path in sorted((self._segment.parent / name).rglob("*")) if path.is_file()]
        base = {path.relative_to(self._segment.parent).as_posix(): path for path in paths}
        contents = {one.content for one in members}
        line = logged if logged.parent in contents else replace(logged, parent=None)
        content = chain_file.dump(ChainIndex(members, (replace(line, step=None),)))
        sizes = {name: path.stat().st_size for name, path in base.items()}
        shares = _shares(sizes, self._world) if self._streams else []
        own = shares[self._rank] if self._streams else base.keys()
        added = {
            name: _SentFile(base[name], sizes[name], start_end=sizes[name] if self._streams else None)
            for name in own
            if name not in self._files
        }
        if self._streams and base and self._rank == 0:
            listed = json.dumps({"files": sizes}).encode()
            added[HELD_FILES] = _SentFile(self._segment, len(listed), True, listed, 1, start_end=len(listed))
        with self._changed:
            if self._streams and self._seen:
                return  # another thread looked at the same time
            self._shares = shares
            before = self._files.pop(chain_file.NAME, None)
            for name in [
                one for one in self._files if not one.startswith(f"{self._segment.name}/") and one not in base
            ]:
                del self._files[name]  # the chain was compacted
            self._files |= added
            if self._rank == 0:
                if before is None or before.content != content:
                    version = 1 if before is None else before.version + 1
                    before = _SentFile(self._segment, len(content), True, content, version, start_end=len(content))
                self._files[chain_file.NAME] = before  # it comes last: what it names is held then
            self._changes += 1
            self._seen = seen
            self._changed.notify_all()

    def _is_compacted(self, name: str, file: _SentFile) -> bool:
        is_of_base = file.content is None and not name.startswith(f"{self._segment.name}/")
        if not is_of_base or file.path.exists() or not (self._segment / layouts.NAME).exists():
            return False
        file.is_gone = True
        return True

    def _base_of(self, chain: ChainIndex, logged: LoggedSteps) -> tuple[Member, ...]:
        """The last base of a segment; with parity, that from which it begins, if it does not have its start itself."""
        if not self._streams:
            return chain.base_of(logged)
        first = () if logged.parent is None else chain.base_of(replace(logged, step=logged.first))
        return first if first or logged.parent is None else chain.base_of(logged)


class SaveSender(Sender):
    """Sends the file of a rank of a published save, and rank 0's the rest of the save and a list that names it.

    Readers see a chain of one member, so they need to know nothing else.
    """

    def __init__(
        self,
        peers: Peers,
        save: SentGeneration,
        folder: Path,
        rank: int,
        member: Member | None,
        say: Callable[[str, str], None],
    ) -> None:
        """Start at once.

        Args:
            save: The generation that the save is; its main files are in the folder of the member.
            folder: The save, a universal checkpoint that needs no other.
            member: The member that the save is, which rank 0 sends as the only one; None on other ranks.
            say: As of `Sender`.

        Raises `CkptError`, and `OSError` if a file of the save is gone.
        """
        main = save.main_file(rank)
        member_folder, _, own = main.partition("/")
        names = [own]
        if member is not None:
            paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
            names += [path.name for path in paths]
        files = {f"{member_folder}/{name}": _whole_file(folder / name, save.step) for name in names}
        files[main].start_end = files[main].nbytes
        if member is not None:
            content = chain_file.dump(ChainIndex((replace(member, folder=member_folder),)))
            files[chain_file.NAME] = _SentFile(folder, len(content), True, content, 1, start_end=len(content))
        super().__init__(peers, save, rank, files, say)

    def _make_room(self, runs: Mapping[NetworkAddress, HeldRun]) -> None:
        """Free what earlier saves have left besides the newest one that is whole: holders have room for two saves.

        A save is left that was given up, or whose job was killed; and one that was not freed yet at the end of its job.
        """
        answers = [HolderAnswer(address, run) for address, run in runs.items()]
        names = {name for run in runs.values() for name in run} - {self._generation}
        saves = {name: PeersStore(self._run, name, answers, None, ()) for name in names}
        older = {name: save for name, save in saves.items() if save.created < self._created}
        whole = [name for name, save in older.items() if save.is_whole]
        if not whole:
            return
        last = max(whole, key=lambda name: older[name].created)
        before = older[last].created if self._has_all_copies(last, runs) else 0
        parts = [name for name, save in older.items() if name not in whole and not save.is_recorded]
        for address, run in runs.items():
            if any(name in parts or older[name].created < before for name in run if name in older):
                self._free(address, before, parts)

    def _has_all_copies(self, name: str, runs: Mapping[NetworkAddress, HeldRun]) -> bool:
        """Whether so many holders have each file of a save that is whole as the scheme says."""
        copies = [run[name] for run in runs.values() if name in run]
        counts = Counter(file for one in copies for file, status in one.items() if status.starts or not is_pack(file))
        return min(counts[file] for one in copies for file in one) >= self._peers.parsed.spares


def _whole_file(path: Path, step: int) -> _SentFile:
    """A file of a save, which belongs to its step from the first byte on. Raises `OSError` if it is gone."""
    return _SentFile(path, path.stat().st_size, ends=[0], steps=[step])


def _shares(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """The files that each rank sends: the largest first, each by the rank that has fewest bytes until then."""
    least, result = [(0, rank) for rank in range(world)], [list[str]() for _ in range(world)]
    for name in sorted((name for name in sizes if sizes[name]), key=lambda one: (-sizes[one], one)):
        nbytes, rank = least[0]
        heapreplace(least, (nbytes + sizes[name], rank))
        result[rank].append(name)
    return result
