"""The files of a log that `ckpt serve` sends, fetched into a folder here, from which a shadow follows them.

The bytes are those of the files, so everything that checks a log checks them. Gradients of steps before the base are
not fetched, and those that the shadow has applied are freed again (as holes in the files), so a folder of bounded size
follows a log of any size.
"""

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from ckpt.shadow.segment_files import MirroredFile, SegmentFiles
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
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.stores.http_client import NO_CREDENTIALS, Credentials, HttpAnswer, Sink
from ckpt_formats.stores.http_place import HttpPlace, check_range
from ckpt_formats.stores.http_store import listing_of
from ckpt_formats.stores.listed_store import StoredObject
from ckpt_formats.stores.repetition import RetryPolicy
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.segment import rank_file

WINDOW = 1 << 30
"""How many bytes of a rank may be here that were not applied yet. (Two steps always may.)"""
_FILE_PART = 64 << 20
"""The bytes of a request of a file that does not change."""
_WAIT = 0.5
"""Seconds that the other side may wait for new bytes."""
_SILENCE = 60.0
"""Seconds without a byte after which a connection is broken."""
_PAUSE = 0.01
"""Seconds to wait while there is no room."""
_SOON, _AGAIN = 0.01, 1.0
"""Seconds after which a broken connection is opened again: twice as long each time."""
_YOUNG = 5.0
"""Seconds in which a folder is being made."""
_MAX_EMPTY = 1000
"""How often in a row a server may state bytes of a log and give none: files are flushed late."""
_MAX_NBYTES_EACH = 64
"""Bytes of a base for each element of the log: weights, their copy, and several states of 4 bytes take fewer."""
_MAX_OTHER = 1 << 30
"""Bytes of a base besides: tensors that no optimizer steps, and extras."""


class LogMirror:
    """Fetches the log of a chain in a thread, until it is closed. Connections that break are opened again.

    path: The folder of the chain here. It is another one after steps were dropped that had been fetched.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials = NO_CREDENTIALS,
        place: Path | None = None,
        window: int = WINDOW,
    ) -> None:
        """Connect and begin. `url`: of the chain; `place`: where files are kept, None: in that of temporary files.

        Raises `NotFoundError` if the server cannot be reached or has no chain there, `UnsupportedError` if it refuses,
        `UnsafeError` if it is not trusted.
        """
        self._window = window
        self._server = HttpPlace.of(url, credentials, RetryPolicy(0.0, _SILENCE, 0.0))
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
        self._chain_tag = ""
        self._folders: dict[str, SegmentFiles] = {}
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
            with _refusals():
                self._read_list()
        except BaseException as error:
            self.close()
            if isinstance(error, IncompleteError):
                raise NotFoundError(error.what, where=error.where, hint=error.hint) from None
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
        self._server.client.close()
        if hasattr(self, "_thread"):
            self._thread.join(5)
            self._server.client.close()  # what its last request may have left open
        shutil.rmtree(self._root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def ready_path(self) -> Path | None:
        """`path`, if all is there that is needed to begin. Raises the error that ended the thread."""
        if self._error is not None:
            raise self._error
        path = self.path
        return path if (path / chain_file.NAME).exists() else None

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
            with _refusals():
                self._follow()
        except (IncompleteError, NotFoundError) as error:  # the other side is gone, or changes its chain
            self._chain = None
            return error.what
        return "closed"

    def _follow(self) -> None:
        """Fetch until the connection breaks."""
        while not self._closed.is_set():
            if self._chain is None:
                self._take_list()
                self.broken = None
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
            listed = self._look(files, seconds)
            answered_early = not files.lag_nbytes and time.monotonic() - began < seconds / 2
            for other in self._folders.values():
                if other is not files:
                    self._look(other, 0.0)
            self._is_unseen = False
            self._behind = self._looks_back or self.lag_nbytes > 0 or listed != self._chain_tag
            if listed != self._chain_tag:
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
        chain, tag = self._read_list()
        if any(not _goes_on(files, chain, self._applied_here()) for files in self._folders.values()):
            self._begin_again()
        last = chain.segments[-1]
        if last.folder not in self._folders:
            self._folders[last.folder] = self._begin(chain, last)
            self._looks_back, self._is_unseen = len(self._folders) == 1, True
        self._write_list(chain)
        self._chain, self._chain_tag = chain, tag

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

    def _begin(self, chain: ChainIndex, logged: LoggedSteps) -> SegmentFiles:
        """Fetch the layout of a segment and its last base."""
        members = chain.base_of(logged)
        listed = self._list(logged.folder).get(layouts.NAME)
        if listed is None:
            raise IncompleteError("the log has no layout yet", where=self._where)
        self._check_room(listed.nbytes, MAX_INDEX, "the layout of the log")
        self._fetch_file(logged.folder, layouts.NAME, listed)
        layout = layouts.load(self.path / logged.folder / layouts.NAME)
        needed = {name: self._list(name) for name in sorted(chain.folders_of(members[-1]) if members else ())}
        total = sum(one.nbytes for files in needed.values() for one in files.values())
        self._check_room(total, _MAX_OTHER + _MAX_NBYTES_EACH * layout.numel, "the base")
        for folder, files in needed.items():
            for name, one in files.items():
                self._fetch_file(folder, name, one)
        start = members[-1].step if members else None
        ranks = [self.path / logged.folder / rank_file(rank) for rank in range(len(layout.ranks))]
        return SegmentFiles(logged, members, [MirroredFile(path, start) for path in ranks])

    def _write_list(self, chain: ChainIndex) -> None:
        """Write the list of what is here: the segments that are followed, and their bases."""
        here = [one for one in chain.segments if one.folder in self._folders]
        needed = {one.step: one for files in self._folders.values() for one in files.members}
        members = tuple(needed[step] for step in sorted(needed))
        contents = {one.content for one in members}
        segments = tuple(one if one.parent in contents else replace(one, parent=None) for one in here)
        draft = self.path / f"{chain_file.NAME}.tmp"
        draft.write_bytes(chain_file.dump(ChainIndex(members, segments)))
        os.replace(draft, self.path / chain_file.NAME)

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
        return self._server.url

    def _read_list(self) -> tuple[ChainIndex, str]:
        """The list of the chain there, and its e_tag."""
        read = self._server.read(chain_file.NAME)
        if read is None:
            raise NotFoundError("the server has no chain there", where=self._where)
        chain = chain_file.parse(read[0], Path(self._server.where(chain_file.NAME)))
        if not chain.segments:
            raise UnsupportedError("the chain has no log of gradients", where=self._where)
        return chain, read[1].e_tag or ""

    def _list(self, folder: str) -> dict[str, StoredObject]:
        """The files of a folder of the chain. Raises as `listing_of`."""
        return listing_of(self._list_answer(folder), self._server.where(folder))[1]

    def _list_answer(self, folder: str, headers: Mapping[str, str] = {}, seconds: float = 0.0) -> HttpAnswer:
        answer = self._server.request(f"{folder}/", headers, query="list", seconds=seconds)
        if answer.status not in (200, 304):
            raise NotFoundError("the chain does not have this folder", where=self._server.where(folder))
        return answer

    def _look(self, files: SegmentFiles, seconds: float) -> str:
        """See the sizes of the logs of a segment, once there is something new, or after so many seconds.

        Returns the e_tag of chain.json.
        """
        known = {"If-None-Match": files.list_tag, "Prefer": f"wait={seconds:.3f}"} if files.list_tag else {}
        answer = self._list_answer(files.logged.folder, known, seconds)
        if answer.status != 304:
            files.chain_tag, listed = listing_of(answer, self._where)
            files.list_tag = answer.headers.get("etag", "")
            rows = [listed.get(rank_file(rank)) for rank in range(len(files.ranks))]
            files.see([0 if row is None else row.nbytes for row in rows])
        return files.chain_tag

    def _request_log(
        self, folder: str, rank: int, begin: int, nbytes: int, write: Callable[[memoryview], None]
    ) -> None:
        def count(part: memoryview) -> None:
            self.received += len(part)
            write(part)

        self._fetch_range(f"{folder}/{rank_file(rank)}", begin, nbytes, count)

    def _fetch_range(self, key: str, begin: int, nbytes: int, write: Sink, tag: str | None = None) -> None:
        """Pass on a range of a file as it arrives; nothing if the file has become shorter."""
        where = self._server.where(key)

        def sink_of(answer: HttpAnswer) -> Sink:
            check_range(answer, begin, nbytes, where)
            return write

        version = "" if tag is None else f"v={quote(tag, safe='')}"
        headers = {"Range": f"bytes={begin}-{begin + nbytes - 1}"}
        answer = self._server.request(key, headers, nbytes, query=version, sink_of=sink_of)
        if answer.status not in (206, 416):
            raise IncompleteError("was removed, or is another file now", where=where)

    def _check_room(self, nbytes: int, most: int, what: str) -> None:
        """Raise `UnsafeError` if files have more than `most` bytes, `NoSpaceError` if there is no room for them."""
        if nbytes > most:
            raise UnsafeError(f"{what} has {nbytes:,} bytes, more than it can need ({most:,})", where=self._where)
        _, _, free = shutil.disk_usage(self._root)
        if nbytes > free:
            raise NoSpaceError(f"{what} has {nbytes:,} bytes, but {free:,} are free", where=self._root)

    def _fetch_file(self, folder: str, name: str, listed: StoredObject) -> None:
        """A file of a state that does not change, or what is missing of it here."""
        path = self.path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:

            def write(part: memoryview) -> None:
                file.write(part)

            while (begin := file.tell()) < listed.nbytes:
                nbytes = min(_FILE_PART, listed.nbytes - begin)
                self._fetch_range(f"{folder}/{name}", begin, nbytes, write, listed.e_tag)
                if file.tell() == begin:
                    raise IncompleteError(f"{name} of {folder} became shorter", where=self._where)


@contextmanager
def _refusals() -> Iterator[None]:
    """Within, an error of the line becomes `IncompleteError`, and a refusal of the server `UnsupportedError`."""
    try:
        yield
    except StoreError as error:
        kind = UnsupportedError if error.is_denied else IncompleteError
        raise kind(error.strerror, where=str(error.filename), hint=error.hint) from None


def _goes_on(files: SegmentFiles, chain: ChainIndex, applied: tuple[str, int] | None) -> bool:
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
