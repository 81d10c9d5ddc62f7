"""What a rank sends: the files of its folder, as a queue of pieces that the threads of all holders read.

The files are the queue: what was not sent yet lies there. So a slow holder takes no memory.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckpt.holding.column_streams import ColumnStream, ColumnStreams
from ckpt.holding.generation import SentGeneration
from ckpt.holding.peers import Peers
from ckpt.holding.sent_file import SentFile
from ckpt_formats.stores import piece_requests
from ckpt_formats.stores.piece_requests import PieceName, SentPiece


class SendQueue:
    """The files that a rank sends, and the streams of parity that their pieces form. Threads share it.

    Attributes:
        files: By name, in the order in which holders get them.
        streams: Of pieces that are added to parities.
        main: The name of the file of the rank that every rank has.
        changed: Wakes threads that wait for something to send, or for the end.
        has_base: Whether `files` has all from which a replay begins.
        is_closing: Whether threads end as soon as a holder has all.
        is_abandoned: Whether threads end without sending what is missing.
    """

    def __init__(
        self,
        peers: Peers,
        generation: SentGeneration,
        rank: int,
        files: dict[str, SentFile],
        *,
        has_base: bool,
        is_compacted: Callable[[str, SentFile], bool],
    ) -> None:
        """`is_compacted`: whether a file cannot be read because the chain was compacted since. Then it notes that."""
        self.generation, self.rank, self.files = generation, rank, files
        self.streams = ColumnStreams(peers, generation, rank)
        self.main = generation.main_file(rank)
        self.has_base = has_base
        self.is_compacted = is_compacted
        self.changed, self.changes = threading.Condition(), 0
        self.is_closing = self.is_abandoned = False
        self.cutting = threading.Lock()  # not `changed`: the writer of the log never waits for a read of a file
        self._starts: dict[ColumnStream, int] | None = None

    @contextmanager
    def change(self) -> Iterator[dict[str, SentFile]]:
        """Change the files. All threads look again then."""
        with self.changed:
            yield self.files
            self._notify()

    def close(self, *, is_abandoned: bool = False) -> None:
        """Let all threads end, once their holders have all; or each after the piece that it sends."""
        with self.changed:
            self.is_closing, self.is_abandoned = True, is_abandoned or self.is_abandoned
            self.changed.notify_all()

    def snapshot(self) -> tuple[list[tuple[str, SentFile]], int]:
        """The files, and how often there was a change until now."""
        with self.changed:
            return list(self.files.items()), self.changes

    def cut(self, name: str, file: SentFile, count: int) -> None:
        """Cut a file into so many pieces, as far as they are there, and place them. The caller holds `cutting`."""
        before = len(file.pieces)
        file.cut_pieces(count, is_last=self.is_closing or name != self.main)
        self.streams.place(name, file)
        if len(file.pieces) > before:
            with self.changed:  # other threads may have looked just before
                self._notify()

    def cut_next(self, files: Sequence[tuple[str, SentFile]]) -> bool:
        """Cut one more piece of what is there, if there is one: other threads need not wait until all is read."""
        for name, file in files:
            if file.is_small or not file.has_rest:
                continue
            with self.cutting:
                count = len(file.pieces)
                try:
                    self.cut(name, file, count + 1)
                except OSError:
                    if not self.is_compacted(name, file):
                        raise
                if len(file.pieces) > count:
                    return True
        return False

    def piece(self, name: str, file: SentFile, number: int) -> tuple[SentPiece, bytes]:
        """A piece, and its bytes. Raises `OSError` if they cannot be read any more."""
        with self.cutting:
            nbytes, digest = file.pieces[number]
            offset = file.offsets[number]
        end = offset + nbytes
        content = file.read(offset, nbytes)
        with self.changed:
            starts = file.start_end is not None and end >= file.start_end
            step = file.step_at(end)
        replaces = file.content is not None and not offset
        return self._sent(name, offset, digest, step, starts, replaces), content

    def mark(self) -> SentPiece:
        """A piece of no bytes, which says that a column has all from which a replay begins."""
        return self._sent(self.main, 0, piece_requests.digest_of(b""), 0, False, False)

    def starts(self, files: Mapping[str, SentFile]) -> dict[ColumnStream, int] | None:
        """By stream, up to which piece it has that from which a replay begins; None if not all of that is there.

        The caller holds `cutting`.
        """
        main = files[self.main]
        parts = [file for name, file in files.items() if not file.is_small and name != self.main]
        if self._starts is None and main.start_end is not None and main.cut >= main.start_end:
            if any(file.is_gone or file.cut < file.nbytes for file in parts):
                return None
            end = main.start_end
            # Files of the base may come after records that are not part of the start.
            self._starts = self.streams.starts(lambda one: one.file is not main or main.offsets[one.number] < end)
        return self._starts

    def _sent(self, name: str, offset: int, digest: str, step: int, starts: bool, replaces: bool) -> SentPiece:
        own = self.generation
        piece = PieceName(own.run, own.name, name, offset)
        return SentPiece(piece, digest, step, starts, replaces, own.world, own.created)

    def _notify(self) -> None:
        """Let all threads look again. The caller holds `changed`."""
        self.changes += 1
        self.changed.notify_all()
