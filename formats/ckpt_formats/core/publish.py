"""What publishes a target: its bytes reach the disk, then one rename, which never replaces what another process has."""

import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""The errors of kernels and file systems that do not support the flag."""
_FLUSHES = 8
"""Files that are flushed at the same time: each waits for the disk, even for a clean file."""


def flush(path: Path) -> None:
    """Wait until a file, or the list of what is in a folder, is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def flush_all(folder: Path) -> None:
    """Wait until a folder and all that is below it are on the disk."""
    with ThreadPoolExecutor(_FLUSHES, "ckpt-flush") as pool:
        list(pool.map(flush, (*folder.rglob("*"), folder)))


def rename_new(source: Path, target: Path) -> None:
    """Rename a file or folder to a name that nothing has. Raises `FileExistsError`, and replaces nothing.

    The kernel guarantees it (`renameat2`, Linux 3.15). Without this call, a file is linked, which never replaces; for a
    folder, the name is checked first, and an empty folder that appears after the check may be replaced.
    """
    code = renameat2(source, target)
    if code in _UNABLE:
        _rename_new_without(source, target)
    elif code:
        raise OSError(code, os.strerror(code), str(target))


def renameat2(source: Path, target: Path) -> int:
    """The system call, with RENAME_NOREPLACE: 0 or an error's number."""
    call = _renameat2()
    if call is None:
        return errno.ENOSYS
    done = call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    return ctypes.get_errno() if done else 0


@cache
def _renameat2() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call


def _rename_new_without(source: Path, target: Path) -> None:
    if not source.is_dir():
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:
            pass  # a file system without links
        else:
            os.unlink(source)
            return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)
