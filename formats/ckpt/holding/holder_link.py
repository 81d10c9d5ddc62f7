"""A thread that gives a holder what it should have, and goes on for as long as something new may come."""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from ckpt.holding.column_streams import ColumnStream, Contribution
from ckpt.holding.peers import HELD
from ckpt.holding.send_queue import SendQueue
from ckpt.holding.sent_file import SentFile
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError
from ckpt_formats.stores import parity_requests, piece_requests
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.parity_requests import HeldParity, ParityPlace
from ckpt_formats.stores.piece_requests import HeldRun, SentPiece

_SECONDS = 20.0
"""How long a holder may take for a connection, or an answer, before it counts as gone."""
_SOON, _LATE = 0.1, 5.0
"""Seconds from one try to reach a holder to the next: twice as long each time."""
_REST_SECONDS = 0.1
"""How long to wait for more bytes of a file whose last ones are few."""
_OWN_SECONDS = 0.02
"""How long a holder of parity waits until it is looked again whether the rank's own holder has a piece."""
_CHECK_SECONDS = 10.0
"""After so long without anything to send, a holder is asked whether it still has what it had."""
_WITHOUT_BASE = "lacks a base that was removed from the chain before it was sent"
"""What is said of a holder, such as one that was started again, that has all else."""


@dataclass(frozen=True)
class HolderPart:
    """A holder, and what it should have of a rank."""

    address: NetworkAddress
    holds_all: bool
    """Whether it should have all pieces."""
    holds_small: bool
    """Whether it should have the small files, at least."""
    rows: tuple[tuple[ColumnStream, int], ...] = ()
    """The streams that it should add to parities, and which row it has of each."""

    def has(self, file: SentFile) -> bool:
        """Whether it should have a file."""
        return self.holds_all or (self.holds_small and file.is_small)


class HolderLink:
    """Sends to one holder, in a thread of its own.

    Attributes:
        part: What the holder should have.
        text: `HELD`, or why it has not what is sent.
        sent: The bytes that were sent to it.
        has_failed: Whether the last try to reach it failed.
        counts: By file, how many of its pieces the holder has, and which version, as far as the connection knows.
        added: By stream, how many pieces were added.
        marked: The streams of which the holder knows that it has all from which a replay begins.
    """

    def __init__(
        self,
        queue: SendQueue,
        part: HolderPart,
        credentials: Credentials,
        own: "HolderLink | None",
        say: Callable[[str, str], None],
    ) -> None:
        """`own`: the rank's own holder, which gets pieces before parities do; None for one that holds all.

        `say`: is called with the address of the holder and `text`, when that changes.
        """
        self.part, self.text, self.sent, self.has_failed = part, "", 0, False
        self._queue, self._credentials, self._own, self._say = queue, credentials, own, say
        self._run, self._generation = queue.generation.run, queue.generation.name
        self.counts: dict[str, tuple[int, int]] = {}
        self.added: dict[ColumnStream, int] = {}
        self.marked: set[ColumnStream] = set()
        self._ends: dict[ColumnStream, int] = {}
        """Where the last piece of each stream ends that the holder has added."""
        self._gapped: set[ColumnStream] = set()
        """The streams of which it has a gap: it has not all from which a replay begins."""
        self._has_base = True
        """Whether it has all of the base that it should hold."""
        self.thread = threading.Thread(target=self._send_all, daemon=True)

    @property
    def address(self) -> NetworkAddress:
        return self.part.address

    def _note(self, text: str) -> None:
        if self.text != text:
            self.text = text
            self._say(str(self.address), text)

    def _send_all(self) -> None:
        queue, pause = self._queue, _SOON
        while True:
            before = self.sent
            try:
                with closing(Connection(self.address, self._credentials, "holder", _SECONDS)) as connection:
                    self._begin(connection)
                    self.has_failed = False
                    while self._send_missing(connection):
                        pass
                return
            except Exception as error:  # a thread that ended would say no more, and its holder seem to hold all
                self.has_failed = True
                what = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
                self._note(error.what if isinstance(error, CkptError) else what)
            # A holder that only refuses, as one without memory does, lists all that it has each time.
            pause = _SOON if self.sent > before else min(2 * pause, _LATE)
            with queue.changed:
                if queue.is_closing:
                    return
                queue.changed.wait_for(lambda: queue.is_closing, pause)

    def _begin(self, connection: Connection) -> None:
        """Ask what the holder has. Raises `CorruptError` if that is something else."""
        self.counts = self._counted(piece_requests.list_run(connection, self._run))
        self.added = dict.fromkeys((stream for stream, _ in self.part.rows), 0)
        self._ends = dict(self.added)
        self.marked, self._gapped, self._has_base = set(), set(), True
        if self.part.rows:
            self._compare_added(parity_requests.list_parities(connection, self._run))

    def _counted(self, run: HeldRun) -> dict[str, tuple[int, int]]:
        """By file, how many of its pieces a holder has, and which version. Raises `CorruptError` if it has others."""
        counts = {}
        for name, file in run.get(self._generation, {}).items():
            own = self._queue.files.get(name)
            if own is None or own.content is not None:
                continue
            with self._queue.cutting:
                self._queue.cut(name, own, len(file.pieces))
                if list(file.pieces) != own.pieces[: len(file.pieces)]:
                    raise CorruptError("has other pieces of this run", where=name)
            counts[name] = (len(file.pieces), own.version)
        return counts

    def _compare_added(self, parities: Sequence[HeldParity]) -> None:
        """Note what a holder has added. Raises `CorruptError` if it has added something else."""
        known = {parity.name: parity.columns for parity in parities}
        for stream, row in self.part.rows:
            column = known.get(self._queue.streams.parity_of(stream, row), {}).get(stream.column)
            if column is None:
                continue
            with self._queue.cutting:
                self.added[stream], has_gap = stream.added(column)
            self._ends[stream] = column.end
            if has_gap:
                self._gapped.add(stream)
            if column.is_marked:
                self.marked.add(stream)

    def _send_missing(self, connection: Connection) -> bool:
        """Send what a holder does not have. Returns whether the sender goes on; waits if there is nothing."""
        queue = self._queue
        files, changes = queue.snapshot()
        for name, file in files:
            while self.part.has(file) and (piece := self._next_piece(name, file)) is not None:
                if queue.is_abandoned:
                    return False
                piece_requests.store(connection, *piece)
                count = 0 if piece[0].replaces else self.counts.get(name, (0, 0))[0]
                self.counts[name] = (count + 1, file.version)
                self.sent += len(piece[1])
        if self.part.rows and not self._add_missing(connection):
            with queue.changed:
                queue.changed.wait(_OWN_SECONDS)
            return not queue.is_abandoned
        # A small piece waits for more. A small file that this holder does not get is others' to read.
        if any(file.has_rest and (self.part.has(file) or not file.is_small) for _, file in files):
            with queue.changed:
                queue.changed.wait_for(lambda: queue.is_closing, _REST_SECONDS)
            return not queue.is_abandoned
        if queue.changes != changes:
            return True
        self._note(HELD if self._has_base and not self._gapped else _WITHOUT_BASE)
        with queue.changed:
            is_new = queue.changed.wait_for(lambda: queue.changes != changes or queue.is_closing, _CHECK_SECONDS)
            if queue.changes == changes and queue.is_closing:
                return False
        if not is_new and not self._is_there(connection):
            raise IncompleteError("has lost what it had of this run")
        return True

    def _is_there(self, connection: Connection) -> bool:
        """Whether a holder still has something of each file and stream of which it had something."""
        if self.counts:
            run = piece_requests.list_run(connection, self._run, with_pieces=False)
            if not self.counts.keys() <= run.get(self._generation, {}).keys():
                return False
        rows = [(stream, row) for stream, row in self.part.rows if self._ends[stream]]
        if not rows:
            return True
        parities = parity_requests.list_parities(connection, self._run, with_pieces=False)
        known = {one.name: one.columns for one in parities}
        return all(stream.column in known.get(self._queue.streams.parity_of(stream, row), {}) for stream, row in rows)

    def _next_piece(self, name: str, file: SentFile) -> tuple[SentPiece, bytes] | None:
        """The next piece that a holder does not have, and its bytes; None also if the chain has it no longer."""
        try:
            with self._queue.cutting:
                count, version = self.counts.get(name, (0, 0))
                if file.content is not None and version != file.version:
                    count = 0
                self._queue.cut(name, file, count + 1)
                if count >= len(file.pieces):
                    return None
            return self._queue.piece(name, file, count)
        except OSError:
            # Copies follow the list of the chain to a newer base; until then it must not be sent without what it names.
            if not self._queue.streams or not self._queue.is_compacted(name, file):
                raise
            self._has_base = False
            return None

    # Parity

    def _add_missing(self, connection: Connection) -> bool:
        """Let a holder add what it has not. Returns False if this waits for the rank's own holder."""
        queue = self._queue
        has_base = queue.has_base
        files, _ = queue.snapshot()
        while True:
            for stream, row in self.part.rows:
                while self.added[stream] < len(stream.contributions):
                    one = stream.contributions[self.added[stream]]
                    if queue.is_abandoned or not self._is_own(one):
                        return False
                    if not self._add(connection, stream, row, one):
                        self._gapped.add(stream)
                    self.added[stream] += 1
            if not queue.cut_next(files):
                break
        with queue.cutting:
            starts = queue.starts(dict(files)) if has_base else None
        for stream, row in self.part.rows:
            is_new = stream not in self.marked and stream not in self._gapped
            if starts is not None and is_new and self.added[stream] >= starts[stream]:
                parity_requests.add(connection, self._place(stream, row, 0), queue.mark(), b"")
                self.marked.add(stream)
        return True

    def _add(self, connection: Connection, stream: ColumnStream, row: int, one: Contribution) -> bool:
        """Let a holder add a piece. Returns False if there is a gap, which counts as zeros: the chain was compacted."""
        try:
            piece, content = self._queue.piece(one.name, one.file, one.number)
        except OSError:
            if not self._queue.is_compacted(one.name, one.file):
                raise
            return False
        parity_requests.add(connection, self._place(stream, row, one.at), piece, content)
        self._ends[stream] = one.at + len(content)
        self.sent += len(content)
        return True

    def _place(self, stream: ColumnStream, row: int, at: int) -> ParityPlace:
        parity = self._queue.streams.parity_of(stream, row)
        return ParityPlace(parity, stream.column, self._queue.rank, at, self._ends[stream])

    def _is_own(self, one: Contribution) -> bool:
        """Whether the rank's own holder has a piece, or does not answer, or nobody can read the piece any more."""
        own = self._own
        return own is None or own.has_failed or one.file.is_gone or own.counts.get(one.name, (0, 0))[0] > one.number
