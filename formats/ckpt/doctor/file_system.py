"""What the file system of a folder can do, tried in a hidden folder that is removed."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.publish import renameat2

_BLOCK = 1 << 20
_MAX_BLOCKS = 16
_MAX_SECONDS = 0.5
"""After which no more blocks are written: a slow file system is known by then."""
_MIN_FREE_NBYTES = 256 << 20
"""With less, nothing large is written."""
_FICLONE = 0x40049409
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EPERM)


@dataclass(frozen=True)
class FileSystem:
    """What a folder's file system can do. None: it could not be tried."""

    folder: Path
    kind: str | None
    """Its name in the table of mounts, such as `ext4` or `lustre`."""
    free_nbytes: int
    """What this user may still write."""
    free_files: int | None
    """How many more files fit; None if there is no such limit."""
    renames_without_replacing: bool | None = None
    """Whether one call renames and never replaces. Without it, `ckpt` looks first."""
    locks: bool | None = None
    """Whether a lock on a file (flock) keeps another process out."""
    reflinks: bool | None = None
    """Whether a copy of a file can share its blocks."""
    syncs: bool | None = None
    """Whether files and folders can be flushed to the disk."""
    sync_seconds: float | None = None
    """Of a file of 4 KiB and its folder."""
    written_rate: float | None = None
    """Bytes per second, with the flush."""
    read_rate: float | None = None
    """Bytes per second; from memory, where the system does not forget what was just written."""
    problem: str | None = None
    """Why nothing can be written; None if it can."""
    leftover: str | None = None
    """The folder of the trials, if it could not be removed."""


def try_file_system(folder: Path) -> FileSystem:
    """Try everything. The folder must exist; `problem` states what it does not allow."""
    kind = find_kind(folder, _read_mounts())
    free_nbytes, free_files = _find_free(folder)
    try:
        trials = Path(tempfile.mkdtemp(prefix=".ckpt-doctor-", dir=folder))
    except OSError as error:
        return FileSystem(folder, kind, free_nbytes, free_files, problem=error.strerror or str(error))
    try:
        written_rate, read_rate = (None, None) if free_nbytes < _MIN_FREE_NBYTES else _measure(trials / "rate")
        sync_seconds = _sync_seconds(trials / "sync")
        answers = {
            "renames_without_replacing": _tried(_renames_without_replacing, trials / "rename"),
            "locks": _tried(_locks, trials / "lock"),
            "reflinks": _tried(_reflinks, trials / "reflink"),
        }
        problem = None
    except OSError as error:  # a full disk, a quota, a server that went away
        written_rate = read_rate = sync_seconds = None
        answers, problem = {}, error.strerror or str(error)
    finally:
        shutil.rmtree(trials, ignore_errors=True)
    return FileSystem(
        folder,
        kind,
        free_nbytes,
        free_files,
        **answers,
        syncs=None if problem else sync_seconds is not None,
        sync_seconds=sync_seconds,
        written_rate=written_rate,
        read_rate=read_rate,
        problem=problem,
        leftover=str(trials) if os.path.lexists(trials) else None,
    )


def find_kind(folder: Path, mounts: str) -> str | None:
    """The kind of the file system of a folder, by a table as in /proc/self/mountinfo; None if it is not in there."""
    place, longest, kind = os.path.realpath(folder), "", None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        if len(words) < 5 or not after:
            continue
        point = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        # Of two mounts at one point, the later one covers the other.
        if (place == point or place.startswith(f"{point.rstrip('/')}/")) and len(point) >= len(longest):
            longest, kind = point, after.split()[0]
    return kind


def _read_mounts() -> str:
    with suppress(OSError):
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return ""


def _find_free(folder: Path) -> tuple[int, int | None]:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0, None
    return status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None


def _tried(trial: Callable[[Path], bool], folder: Path) -> bool | None:
    """The result of a trial in a new folder; None if the system refuses in a way that says nothing."""
    folder.mkdir()
    try:
        return trial(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False if error.errno in _UNABLE else None


def _renames_without_replacing(folder: Path) -> bool:
    for name in ("a", "b"):
        (folder / name).write_bytes(name.encode())
    return renameat2(folder / "a", folder / "b") == errno.EEXIST and renameat2(folder / "a", folder / "c") == 0


def _locks(folder: Path) -> bool:
    """Two descriptors of one file have two locks, also within a process."""
    with open(folder / "lock", "wb") as first, open(folder / "lock", "rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _reflinks(folder: Path) -> bool:
    (folder / "source").write_bytes(bytes(1 << 16))
    with open(folder / "source", "rb") as source, open(folder / "copy", "wb") as copy:
        fcntl.ioctl(copy.fileno(), _FICLONE, source.fileno())
    return True


def _sync_seconds(folder: Path) -> float | None:
    """How long it takes to flush a small file and its folder; None if that cannot be done."""
    folder.mkdir()
    with open(folder / "file", "wb") as file:
        file.write(bytes(4096))
        file.flush()
        started = time.perf_counter()
        try:
            os.fsync(file.fileno())
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            return None
    return time.perf_counter() - started


def _measure(file: Path) -> tuple[float, float]:
    """Rates of writing and reading, in bytes per second."""
    block = os.urandom(_BLOCK)  # zeros would be compressed by some file systems
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        started, nbytes = time.perf_counter(), 0
        while nbytes < _MAX_BLOCKS * _BLOCK and time.perf_counter() - started < _MAX_SECONDS:
            nbytes += os.write(descriptor, block)
        with suppress(OSError):  # whether it can be flushed is tried elsewhere
            os.fsync(descriptor)
        written = time.perf_counter() - started
        with suppress(OSError, AttributeError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started, nread = time.perf_counter(), 0
        while nread < nbytes and time.perf_counter() - started < _MAX_SECONDS:
            data = os.pread(descriptor, _BLOCK, nread)
            if not data:
                break
            nread += len(data)
        return nbytes / written, nread / max(time.perf_counter() - started, 1e-9)
    finally:
        os.close(descriptor)
