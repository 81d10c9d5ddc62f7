"""The files of a log elsewhere, fetched over a socket into a folder here, from which a shadow follows them.

The bytes are those of the files, so everything that checks a log checks them. Gradients of steps before the base are
not fetched, and those that the shadow has applied are freed again (as holes in the files), so a folder of bounded size
follows a log of any size.
"""

import fcntl
import json
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt.serving.address import NetworkAddress
from ckpt.shadow import wire
from ckpt.shadow.bases import bases_of
from ckpt.shadow.connection import Connection
from ckpt.shadow.log_server import MAX_LIST, MAX_LOG, list_hash
from ckpt.shadow.wire import FrameKind
from ckpt_formats.core.claims import MAX_INDEX
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NoSpaceError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.own_folder import create_own, is_own
from ckpt_formats.core.values import is_natural
from ckpt_formats.stores.http_client import NO_CREDENTIALS, Credentials
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain.file import ChainIndex, LoggedSteps, Member
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.record import ENTRY, FILE_HEAD, HEAD, RECORD_MAGIC, Kind
from ckpt_formats.universal.gradients.segment import rank_file

WINDOW = 1 << 30
"""How many bytes of a rank may be here that were not applied yet. (Two steps always may.)"""
_READ = 8 << 20
"""The bytes of a request, while the log is followed."""
_PEEK = 1 << 16
"""The bytes of a request, while records are passed over."""
_WAIT = 0.5
"""Seconds that the other side may wait for new bytes."""
_PAUSE = 0.01
"""Seconds to wait while there is no room."""
_SOON, _AGAIN = 0.01, 1.0
"""Seconds after which a broken connection is opened again: twice as long each time."""
_YOUNG = 5.0
"""Seconds in which a folder is being made."""
_MAX_FILES = 1 << 20
_MAX_EMPTY = 1000
"""How often in a row a server may state bytes of a log and give none: files are flushed late."""
_MAX_PARTS, _MAX_PART = 8, 255
"""The parts of a file's name within its folder, and the characters of each."""
_MAX_NBYTES_EACH = 64
"""Bytes of a base for each element of the log: weights, their copy, and several states of 4 bytes take fewer."""
_MAX_OTHER = 1 << 30
"""Bytes of a base besides: tensors that no optimizer steps, and extras."""
_MAX_NBYTES = 1 << 50
_STEPPED = (Kind.GRADIENTS, Kind.STATE)
"""The kinds of records whose chunks are not needed before the base."""


class LogMirror:
    """Fetches the log of a chain in a thread, until it is closed. Connections that break are opened again.

    path: The folder of the chain here. It is another one after steps were dropped that had been fetched.
    """

    def __init__(
        self,
        address: NetworkAddress,
        credentials: Credentials = NO_CREDENTIALS,
        place: Path | None = None,
        window: int = WINDOW,
    ) -> None:
        """Connect and begin. `place`: where files are kept; None: in the folder of temporary files.

        Raises as `Connection` if that is not possible now.
        """
        self.address, self._credentials, self._window = address, credentials, window
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(Path(tempfile.gettempdir()) if place is None else place)
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        os.close(create_own(self._root / _LOCK))
        self._lock = _lock(self._root)
        self.path = self._root / "0"
        self.path.mkdir()
        self._generation = 0
        self._chain: ChainIndex | None = None
        self._list_hash = ""
        self._folders: dict[str, _SegmentFiles] = {}
        self._applied: tuple[Path, int] | None = None
        self._closed = threading.Event()
        self._error: CkptError | None = None
        self._behind = self._is_unseen = True
        self._looks_back = False
        self._without_progress = 0
        self.broken: str | None = None
        """Why there is no connection now; None: there is one."""
        self.received = 0
        """The bytes of logs that were received."""
        try:
            self._connection = Connection(address, credentials, "log")
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._run, name="ckpt-shadow-mirror", daemon=True)
        self._thread.start()

    def __enter__(self) -> "LogMirror":
        return self

    def __exit__(self, *ignored: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and remove the files."""
        self._closed.set()
        if hasattr(self, "_connection"):
            self._connection.close()
            self._thread.join(5)
        shutil.rmtree(self._root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def ready_path(self) -> Path | None:
        """`path`, if all is there that is needed to begin. Raises the error that ended the thread."""
        if self._error is not None:
            raise self._error
        path = self.path
        return path if (path / index.NAME).exists() else None

    @property
    def is_behind(self) -> bool:
        """Had the other side more, at the last request? Raises the error that ended the thread."""
        if self._error is not None:
            raise self._error
        return self._behind

    @property
    def lag_nbytes(self) -> int:
        """The bytes of the log that were not fetched yet, as far as is known."""
        return sum(files.lag_nbytes for files in list(self._folders.values()))

    def applied(self, segment: Path, step: int) -> None:
        """Say up to which step the gradients of a segment, whose folder is here, are no longer needed."""
        before = self._applied
        if before is not None and before[0] == segment:
            step = max(step, before[1])  # a shadow goes back when steps were dropped; what was freed stays so
        self._applied = (segment, step)

    def forget(self, path: Path) -> None:
        """Remove the files of an earlier `path`."""
        if path != self.path:
            shutil.rmtree(path, ignore_errors=True)

    # The thread

    def _run(self) -> None:
        try:
            pause = _SOON
            while not self._closed.is_set():
                received = self.received
                why = self._follow_until_broken()
                pause = min(2 * pause, _AGAIN) if self.received == received else _SOON
                self.broken = why
                self._closed.wait(pause)
        except CkptError as error:
            self._error = error
        except OSError as error:
            what = f"the log cannot be kept here: {error.strerror or error}"
            self._error = IncompleteError(what, where=self._root)
        except Exception as error:  # without it the shadow would wait for this thread for ever
            self._error = CorruptError(f"the answers cannot be used: {error!r:.200}", where=self._where)

    def _follow_until_broken(self) -> str:
        """Fetch until the connection breaks. Returns why."""
        try:
            if self.broken is not None:
                self._connection = Connection(self.address, self._credentials, "log")
                self._chain, self.broken = None, None
            self._follow()
        except (IncompleteError, NotFoundError) as error:  # the other side is gone, or changes its chain
            return error.what
        finally:
            self._connection.close()
        return "closed"

    def _follow(self) -> None:
        """Fetch until the connection breaks."""
        while not self._closed.is_set():
            if self._chain is None:
                self._take_list()
            assert self._chain is not None
            if not self._free(self._chain):
                self._chain = None
                continue
            busy = has_room = False
            for files in list(self._folders.values()):
                moved, room = files.fetch(self._request_log, self._window)
                busy |= moved
                has_room |= room
            self._demand_progress(busy or not has_room or not self.lag_nbytes)
            if busy or (self._looks_back and not self._is_unseen and self._look_back(self._chain)):
                continue
            files = self._folders[self._chain.segments[-1].folder]
            seconds, began = _WAIT if has_room or not files.lag_nbytes else 0.0, time.monotonic()
            nbytes, listed = self._grown(files, seconds)
            files.see(nbytes)
            answered_early = not files.lag_nbytes and time.monotonic() - began < seconds / 2
            for other in self._folders.values():
                if other is not files:
                    other.see(self._grown(other, 0.0)[0])
            self._is_unseen = False
            self._behind = self._looks_back or self.lag_nbytes > 0 or listed != self._list_hash
            if listed != self._list_hash:
                self._chain = None
            elif (not has_room and files.lag_nbytes) or self._without_progress or answered_early:
                self._closed.wait(_PAUSE)

    def _demand_progress(self, progressed: bool) -> None:
        """Raise `CorruptError` if the other side states bytes of logs again and again that it does not give."""
        self._without_progress = 0 if progressed else self._without_progress + 1
        if self._without_progress > _MAX_EMPTY:
            raise CorruptError("the log has fewer bytes than is stated", where=self._where)

    def _take_list(self) -> None:
        """Read the list of the chain, and fetch what its last segment needs to begin."""
        content = self._request({"request": "list"}, MAX_LIST)
        chain = self._parsed(content)
        if not chain.segments:
            raise UnsupportedError("the chain has no log of gradients", where=self._where)
        if any(not _goes_on(files, chain, self._applied_here()) for files in self._folders.values()):
            self._begin_again()
        last = chain.segments[-1]
        if last.folder not in self._folders:
            self._folders[last.folder] = self._begin(chain, last)
            self._looks_back, self._is_unseen = len(self._folders) == 1, True
        self._write_list(chain)
        self._chain, self._list_hash = chain, list_hash(content)

    def _look_back(self, chain: ChainIndex) -> bool:
        """Fetch the segment before as well, if the start of the only one that is here is not complete yet."""
        self._looks_back = False
        number = next((i for i, one in enumerate(chain.segments) if one.folder in self._folders), 0)
        if number == 0 or self._folders[chain.segments[number].folder].has_start:
            return False
        before = chain.segments[number - 1]
        if before.step != chain.segments[number].first:
            return False
        self._folders = {before.folder: self._begin(chain, before), **self._folders}
        self._looks_back = self._is_unseen = True
        self._write_list(chain)
        return True

    def _applied_here(self) -> tuple[str, int] | None:
        """The segment that the shadow is in, and the step; None: it is not in one that is followed now."""
        applied = self._applied  # the shadow's thread may say another one, or one of an earlier `path`
        if applied is None or applied[0].parent != self.path or applied[0].name not in self._folders:
            return None
        return applied[0].name, applied[1]

    def _begin_again(self) -> None:
        """Steps that were fetched are no longer in the chain: begin in another folder."""
        self._generation += 1
        path = self._root / str(self._generation)
        path.mkdir()
        self._folders, self.path = {}, path

    def _begin(self, chain: ChainIndex, logged: LoggedSteps) -> "_SegmentFiles":
        """Fetch the layout of a segment and its last base."""
        bases = bases_of(chain, logged)
        members = chain.upto(bases[-1].step) if bases else ()
        nbytes = self._sizes(logged.folder).get(layouts.NAME, 0)
        self._check_room(nbytes, MAX_INDEX, "the layout of the log")
        self._fetch_file(logged.folder, layouts.NAME, nbytes)
        layout = layouts.load(self.path / logged.folder / layouts.NAME)
        needed = {name: self._sizes(name) for name in sorted(chain.folders_of(members[-1]) if members else ())}
        total = sum(sum(sizes.values()) for sizes in needed.values())
        self._check_room(total, _MAX_OTHER + _MAX_NBYTES_EACH * layout.numel, "the base")
        for folder, sizes in needed.items():
            for name, nbytes in sizes.items():
                self._fetch_file(folder, name, nbytes)
        start = members[-1].step if members else None
        ranks = [self.path / logged.folder / rank_file(rank) for rank in range(len(layout.ranks))]
        return _SegmentFiles(logged, members, [_RankFile(path, start) for path in ranks])

    def _write_list(self, chain: ChainIndex) -> None:
        """Write the list of what is here: the segments that are followed, and their bases."""
        here = [one for one in chain.segments if one.folder in self._folders]
        needed = {one.step: one for files in self._folders.values() for one in files.members}
        members = tuple(needed[step] for step in sorted(needed))
        contents = {one.content for one in members}
        segments = tuple(one if one.parent in contents else replace(one, parent=None) for one in here)
        draft = self.path / f"{index.NAME}.tmp"
        draft.write_bytes(index.dump(ChainIndex(members, segments)))
        os.replace(draft, self.path / index.NAME)

    def _free(self, chain: ChainIndex) -> bool:
        """Free what was applied: gradients, and all of the segment before. Returns False if that was dropped since."""
        applied = self._applied_here()
        if applied is None:
            return True
        segment, step = applied
        limit = next((one.step for one in chain.segments if one.folder == segment), None)
        if limit is not None and limit < step:
            self._begin_again()
            return False
        self._folders[segment].free(step)
        for name in list(self._folders):
            if name == segment:
                break
            members = {one.folder for one in self._folders.pop(name).members}
            needed = {one.folder for files in self._folders.values() for one in files.members}
            self._write_list(chain)
            for folder in (name, *members.difference(needed)):
                shutil.rmtree(self.path / folder, ignore_errors=True)
        return True

    # Requests

    @property
    def _where(self) -> str:
        return f"tcp://{self.address}"

    def _request(self, fields: Mapping[str, Any], max_nbytes: int) -> bytearray:
        self._connection.send(FrameKind.REQUEST, json.dumps(dict(fields)).encode())
        return self._connection.receive(FrameKind.ANSWER, max_nbytes)

    def _request_json(self, fields: Mapping[str, Any]) -> Any:
        try:
            return json.loads(self._request(fields, MAX_LIST))
        except (ValueError, RecursionError):
            raise self._damaged() from None

    def _request_log(
        self, folder: str, rank: int, begin: int, nbytes: int, write: Callable[[memoryview], None]
    ) -> None:
        fields = {"request": "log", "folder": folder, "rank": rank, "range": [begin, nbytes]}
        self._connection.send(FrameKind.REQUEST, json.dumps(fields).encode())

        def count(part: memoryview) -> None:
            self.received += len(part)
            write(part)

        self._connection.receive_log(nbytes, count)

    def _grown(self, files: "_SegmentFiles", seconds: float) -> tuple[list[int], str]:
        known = [one.known for one in files.ranks]
        fields = {"request": "grown", "folder": files.logged.folder, "list": self._list_hash, "nbytes": known}
        answer = self._request_json({**fields, "seconds": seconds})
        nbytes, listed = (answer.get("nbytes"), answer.get("list")) if isinstance(answer, dict) else (None, None)
        if not isinstance(nbytes, list) or len(nbytes) != len(known) or not isinstance(listed, str):
            raise self._damaged()
        if not all(is_natural(one) and one < _MAX_NBYTES for one in nbytes):
            raise self._damaged()
        return nbytes, listed

    def _sizes(self, folder: str) -> dict[str, int]:
        """The names and sizes of a folder's files. Raises `UnsafeError` for a name that would leave the folder."""
        rows = self._request_json({"request": "folder", "folder": folder})
        if not isinstance(rows, list) or len(rows) > _MAX_FILES:
            raise self._damaged()
        sizes = {}
        for row in rows:
            if not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and is_natural(row[1])):
                raise self._damaged()
            if row[1] >= _MAX_NBYTES or not _is_file_name(row[0]):
                what = f"the name {row[0]!r:.80} leaves its folder, or is none of a file of a chain"
                raise UnsafeError(what, where=self._where)
            sizes[row[0]] = row[1]
        return sizes

    def _check_room(self, nbytes: int, most: int, what: str) -> None:
        """Raise `UnsafeError` if files have more than `most` bytes, `NoSpaceError` if there is no room for them."""
        if nbytes > most:
            raise UnsafeError(f"{what} has {nbytes:,} bytes, more than it can need ({most:,})", where=self._where)
        _, _, free = shutil.disk_usage(self._root)
        if nbytes > free:
            raise NoSpaceError(f"{what} has {nbytes:,} bytes, but {free:,} are free", where=self._root)

    def _fetch_file(self, folder: str, name: str, nbytes: int) -> None:
        """A file of a state that does not change, or what is missing of it here."""
        path = self.path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            while (begin := file.tell()) < nbytes:
                wanted = min(wire.CHUNK_NBYTES, nbytes - begin)
                fields = {"request": "file", "folder": folder, "file": name, "range": [begin, wanted]}
                part = self._request(fields, wanted)
                if not part:
                    raise IncompleteError(f"{name} of {folder} became shorter", where=self._where)
                file.write(part)

    def _parsed(self, content: bytearray) -> ChainIndex:
        """The list of the chain there. Raises `CorruptError`."""
        draft = self._root / "there.json"
        draft.write_bytes(content)
        try:
            return index.load(draft)
        except CkptError as error:
            raise type(error)(error.what, where=self._where) from None

    def _damaged(self) -> CorruptError:
        return CorruptError("the answer cannot be read", where=self._where)


def _is_file_name(name: str) -> bool:
    """Whether it is the name of a file in a member of a chain: of letters that every file system has, and not deep."""
    parts = name.split("/")
    named = len(parts) <= _MAX_PARTS and all(0 < len(one) <= _MAX_PART and one not in (".", "..") for one in parts)
    return named and name.isascii() and name.isprintable()


class _SegmentFiles:
    """The files of a segment here."""

    def __init__(self, logged: LoggedSteps, members: tuple[Member, ...], ranks: "list[_RankFile]") -> None:
        self.logged, self.members, self.ranks = logged, members, ranks

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


class _RankFile:
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
                request(self.end, min(self.known - self.end, most, MAX_LOG), write)
                self._read_heads(file)
        return self.end > before

    def free(self, step: int) -> None:
        """Make holes of the gradients of steps before this one."""
        if not self._waiting or self._waiting[0][0] >= step:
            return
        with self._path.open("r+b", buffering=0) as file:
            while self._waiting and self._waiting[0][0] < step:
                _, begin, end = self._waiting.popleft()
                _make_hole(file.fileno(), begin, end)
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


def _goes_on(files: _SegmentFiles, chain: ChainIndex, applied: tuple[str, int] | None) -> bool:
    """Does a chain still have the steps of a segment that were fetched, or at least those that were applied?"""
    logged = next((one for one in chain.segments if one.folder == files.logged.folder), None)
    if logged is None:
        return applied is not None and _is_before(applied[0], files.logged, chain)
    if (logged.run, logged.first) != (files.logged.run, files.logged.first):
        return False
    step = applied[1] if applied is not None and applied[0] == logged.folder else 0
    return logged.step is None or step <= logged.step


def _is_before(segment: str, earlier: LoggedSteps, chain: ChainIndex) -> bool:
    """Is the segment that is followed now a later one, which the chain still has?"""
    return any(one.folder == segment and one.first >= earlier.first for one in chain.segments)


def _make_hole(file: int, begin: int, end: int) -> None:
    """Free the space of a range of a file, if the file system can do that. The range is not read any more."""
    begin, end = -(-begin // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY, end // mmap.PAGESIZE
    end *= mmap.PAGESIZE
    if end > begin and hasattr(mmap, "MADV_REMOVE"):
        with suppress(OSError), mmap.mmap(file, end - begin, offset=begin) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)


_PREFIX = "ckpt-mirror-"
_LOCK = "lock"


def _lock(root: Path) -> int | None:
    """Lock the folder of a mirror for as long as this process lives. None: another one does."""
    file = os.open(root / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _remove_leftovers(place: Path) -> None:
    """Remove the folders of mirrors whose process was killed."""
    for root in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            # A younger one may not be locked yet.
            if time.time() - root.lstat().st_mtime < _YOUNG or not is_own(root, _LOCK):
                continue
            try:
                file = _lock(root)
            except FileNotFoundError:  # killed before it had a lock: it is empty, or not a mirror's
                root.rmdir()
                continue
            if file is not None:
                shutil.rmtree(root, ignore_errors=True)
                os.close(file)
