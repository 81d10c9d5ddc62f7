"""What publishes a target: its bytes reach the disk, then one rename, which never replaces what another process has."""

import ctypes
import errno
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""The errors of kernels and file systems that do not support the flag."""
_UNABLE_TO_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
"""The errors of file systems that cannot flush folders."""
_UNABLE_TO_REPLACE = (*_UNABLE, errno.EEXIST, errno.EXDEV)
_UNABLE_TO_BEGIN = (*_UNABLE, errno.ESPIPE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
"""The errors after which all pages are still to be written."""
_SYNC_FILE_RANGE_WRITE = 2
_EARLY_NBYTES = 8 << 20
"""Bytes that the disk gets at a time while a file is written."""
_SHARED_UNIT = 2 << 20
"""The largest page of the cache: Linux makes none that is larger than one `write`, of which ours have 1 MiB."""
_FLUSHES = 8
"""Files that are flushed at the same time: each waits for the disk, even for a clean file."""


class FlushError(OSError):
    """The disk did not take a file, or the list of a folder. The system then believes that it is on the disk.

    So a second flush would succeed, and prove nothing: what was not flushed has to be written again.
    """


def flush(path: Path) -> bool:
    """Wait until a file, or the list of what is in a folder, is on the disk. Raises `FlushError`.

    False if it is a folder, and the file system cannot flush folders.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno in _UNABLE_TO_FLUSH and stat.S_ISDIR(os.fstat(opened).st_mode):
            return False
        raise FlushError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(opened)
    return True


class EarlyFlush:
    """Lets the disk begin with a file while it is written, so that its flush waits for less. It promises nothing.

    What fails after the call is reported by the flush, although that opens the file anew: the call waits for nothing
    and so uses up no error of a write, and an error that nobody has seen is also that of who opens the file later
    (Linux before 4.13 and since 4.17, while the inode is in memory). But what fails in the call may be reported by
    nothing else: ext4 drops pages for which it gets no blocks.
    """

    def __init__(self, path: Path, file: int, start: int = 0, is_shared: bool = False) -> None:
        """`file`: the descriptor. `start`: the first byte that is written. `is_shared`: others write other ranges.

        Of a shared file, only whole units of 2 MiB go to the disk early: if it does not take a page, the bytes of
        nobody else are in it. The flush takes the rest.
        """
        self._path = path
        self._file = file
        self._unit = _SHARED_UNIT if is_shared else 1
        self._start = -(-start // self._unit) * self._unit
        self._call = _sync_file_range()

    def note(self, stop: int) -> None:
        """All bytes before `stop` are written: about 8 MiB at a time go to the disk, and nobody waits for them.

        Raises `FlushError` if the disk does not take them.
        """
        stop -= stop % self._unit
        if self._call is None or stop - self._start < _EARLY_NBYTES:
            return
        if self._call(self._file, self._start, stop - self._start, _SYNC_FILE_RANGE_WRITE):
            number = ctypes.get_errno()
            if number not in _UNABLE_TO_BEGIN:
                raise FlushError(number, os.strerror(number), str(self._path))
            self._call = None
        self._start = stop


def flush_or_remove(path: Path) -> bool:
    """As `flush`; after a failure, the file, or all files of the folder, are removed, and must be written again."""
    try:
        return flush(path)
    except FlushError:
        for file in path.iterdir() if path.is_dir() else (path,):
            if not file.is_dir():
                file.unlink(missing_ok=True)
        raise


def flush_all(folder: Path) -> bool:
    """Wait until a folder and all that is below it are on the disk, as `flush_or_remove` does. Raises `FlushError`.

    False if the file system cannot flush folders.
    """
    from concurrent.futures import ThreadPoolExecutor  # it imports `logging`, and a command that reads flushes nothing

    with ThreadPoolExecutor(_FLUSHES, "ckpt-flush") as pool:
        flushed = [pool.submit(flush_or_remove, path) for path in (*folder.rglob("*"), folder)]
    errors = [error for one in flushed if (error := one.exception()) is not None]
    for error in sorted(errors, key=lambda error: not isinstance(error, FlushError)):
        raise error  # not of a file that was removed with its folder, if there is another
    return all(one.result() for one in flushed)


class RenameError(OSError):
    """The file system cannot rename as ckpt needs it."""

    hint = "Choose a folder on another file system; `ckpt doctor FOLDER` shows what one can do."


def replace(source: Path, target: Path) -> None:
    """Rename a file over another one, if there is one. Raises `RenameError` where a file system cannot do so."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno not in _UNABLE_TO_REPLACE:
            raise
        what = f"the file system cannot rename a file over another one ({error.strerror})"
        raise RenameError(error.errno, what, str(target)) from error


def rename_new(source: Path, target: Path) -> None:
    """Rename a file or folder to a name that nothing has. Raises `FileExistsError`, and replaces nothing.

    The kernel guarantees it (`renameat2`, Linux 3.15). Without this call, a file is linked, which never replaces; for a
    folder, the name is checked first, and an empty folder that appears after the check may be replaced.
    """
    code = renameat2(source, target)
    if code in _UNABLE:
        code = _rename_new_without(source, target)
    if code == errno.EXDEV:
        raise RenameError(code, f"the file system cannot rename it to the target ({os.strerror(code)})", str(target))
    if code:
        raise OSError(code, os.strerror(code), str(target))


def exchange(first: Path, second: Path) -> None:
    """Give two files or folders each other's names, at once: at every moment, both names are there.

    Where the kernel or the file system cannot do so, a file replaces the other one, which is gone then; for a folder,
    `RenameError` is raised.
    """
    code = renameat2(first, second, _RENAME_EXCHANGE)
    if code in _UNABLE and first.is_file() and second.is_file():
        replace(first, second)
    elif code in _UNABLE:
        raise RenameError(code, f"the file system cannot exchange two names ({os.strerror(code)})", str(second))
    elif code:
        raise OSError(code, os.strerror(code), str(second))


def renameat2(source: Path, target: Path, flag: int = _RENAME_NOREPLACE) -> int:
    """The system call, with RENAME_NOREPLACE or another flag: 0 or an error's number."""
    call = _renameat2()
    if call is None:
        return errno.ENOSYS
    done = call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag)
    return ctypes.get_errno() if done else 0


def _sync_file_range() -> Any:
    return _c_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def _renameat2() -> Any:
    return _c_function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)


@cache
def _c_function(name: str, *types: Any) -> Any:
    """A function of the C library with arguments of these types; None if it is not there."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = types
    return function


def _rename_new_without(source: Path, target: Path) -> int:
    """As `renameat2`, without this call. Raises `FileExistsError`."""
    if not source.is_dir():
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:
            pass  # a file system without links
        else:
            os.unlink(source)
            return 0
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    try:
        os.rename(source, target)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
