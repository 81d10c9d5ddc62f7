"""The files of a segment of a log, as far as they were fetched, with holes for what is no longer needed."""

import mmap
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckpt_formats.universal.chain.chain_file import LoggedSteps, Member
from ckpt_formats.universal.gradients.record import ENTRY, FILE_HEAD, HEAD, RECORD_MAGIC, Kind

_READ = 8 << 20
"""The bytes of a request, while the log is followed."""
_PEEK = 1 << 16
"""The bytes of a request, while records are passed over."""
_STEPPED = (Kind.GRADIENTS, Kind.STATE)
"""The kinds of records whose chunks are not needed before the base."""
_MAX_NBYTES = 1 << 50


class SegmentFiles:
    """The files of a segment here."""

    def __init__(self, logged: LoggedSteps, members: tuple[Member, ...], ranks: "list[MirroredFile]") -> None:
        self.logged, self.members, self.ranks = logged, members, ranks
        self.list_tag = self.chain_tag = ""
        """Of the last list of the folder, and of chain.json at that time."""

    @property
    def lag_nbytes(self) -> int:
        return sum(max(0, one.known - one.end) for one in self.ranks)

    @property
    def has_start(self) -> bool:
        """Is all here from which a replay begins?"""
        return bool(self.members) or all(one.has_start for one in self.ranks)

    def see(self, nbytes: list[int]) -> None:
        """Note the sizes of all files there."""
        for one, known in zip(self.ranks, nbytes, strict=True):
            one.known = known

    def fetch(self, request: Callable[..., None], window: int) -> tuple[bool, bool]:
        """Fetch some bytes of each rank. Returns whether there were any, and whether there is room for more."""
        moved, room = False, False
        for rank, one in enumerate(self.ranks):
            if one.has_room(window):
                room = True
                moved |= one.fetch(lambda *a, rank=rank: request(self.logged.folder, rank, *a))
        return moved, room

    def free(self, step: int) -> None:
        """Make holes of the gradients of steps before this one."""
        for one in self.ranks:
            one.free(step)


class MirroredFile:
    """The file of a rank's log: what is here, which records these bytes are, and which of them were freed.

    Attributes:
        known: The size of the file there, as far as is known.
        end: Where the bytes end that are here. A part that is not needed counts as here, and is a hole.
        has_start: Is a fingerprint here? One follows the states at the start of a segment.
    """

    def __init__(self, path: Path, start: int | None) -> None:
        """`start`: the step of the base; None: the log itself has the state at its start."""
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        self._path = path
        self._start = start
        self._at = FILE_HEAD.size
        """Where the next record begins whose head was not read yet."""
        self._is_log = True
        self._passes_over = start is not None
        self._waiting = deque[tuple[int, int, int]]()
        """Of records that were not applied: the step, where that begins which is not needed then, and the end."""
        self._applied_end = 0
        """Where the records end that were applied."""
        self.known = self.end = 0
        self.has_start = False

    def has_room(self, window: int) -> bool:
        """May more be fetched? Always of two steps, so that one of them is complete."""
        steps = self._waiting[-1][0] - self._waiting[0][0] if self._waiting else 0
        return self.end - self._applied_end < window or steps < 2

    def fetch(self, request: Callable[[int, int, Callable[[memoryview], None]], None]) -> bool:
        """Fetch the bytes that follow. Returns whether there were any."""
        before = self.end
        if before >= self.known:
            return False
        with self._path.open("r+b", buffering=0) as opened:  # there may be thousands of ranks
            file = opened.fileno()
            self._read_heads(file)  # what was not needed may have been incomplete before

            def write(part: memoryview) -> None:
                os.pwrite(file, part, self.end)
                self.end += len(part)

            if self.end < self.known:
                most = _PEEK if self._passes_over else _READ
                request(self.end, min(self.known - self.end, most), write)
                self._read_heads(file)
        return self.end > before

    def free(self, step: int) -> None:
        """Make holes of the gradients of steps before this one."""
        if not self._waiting or self._waiting[0][0] >= step:
            return
        with self._path.open("r+b", buffering=0) as file:
            while self._waiting and self._waiting[0][0] < step:
                _, begin, end = self._waiting.popleft()
                make_hole(file.fileno(), begin, end)
                self._applied_end = end

    def _read_heads(self, file: int) -> None:
        """Read the heads of records that are here, and pass over the chunks of those before the base.

        Nothing is checked: that is for those who read the file. What is no record is only kept.
        """
        while self._is_log and self.end >= self._at + HEAD.size:
            raw = os.pread(file, HEAD.size, self._at)
            magic, kind, _, step, meta, count, nbytes = HEAD.unpack(raw)[:7]
            begin = self._at + HEAD.size + meta + count * ENTRY.itemsize
            end = begin + nbytes
            if magic != RECORD_MAGIC or end >= _MAX_NBYTES or step >= 1 << 62:
                self._is_log = self._passes_over = False
                return
            if self._passes_over and self._start is not None:
                if step >= self._start:
                    self._passes_over = False
                elif kind in _STEPPED and self.end < end:
                    if self.end < begin or self.known < end:
                        return  # the rest of its head is fetched first
                    os.ftruncate(file, end)
                    self.end = end
            self.has_start |= kind == Kind.FINGERPRINT  # it follows the states at the start
            if self._start is None or step >= self._start:
                self._waiting.append((step, begin if kind == Kind.GRADIENTS else end, end))
            else:
                self._applied_end = end
            self._at = end


def make_hole(file: int, begin: int, end: int) -> None:
    """Free the space of a range of a file, if the file system can do that. The range is not read any more."""
    begin, end = -(-begin // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY, end // mmap.PAGESIZE
    end *= mmap.PAGESIZE
    if end > begin and hasattr(mmap, "MADV_REMOVE"):
        with suppress(OSError), mmap.mmap(file, end - begin, offset=begin) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)
