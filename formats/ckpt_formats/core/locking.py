"""One writer at a time: a lock on a file, which the system releases when the process ends, also after a crash."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_formats.core.errors import LockedError, NoSpaceError, OutputError
from ckpt_formats.core.own_folder import check_plain, is_draft
from ckpt_formats.core.publish import RenameError
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.core.text import PARTIAL

FULL = (errno.ENOSPC, errno.EDQUOT)
_HINTS = {
    errno.EACCES: "Check the permissions of the file and its folder, or write elsewhere.",
    errno.EPERM: "Check the permissions of the file and its folder, or write elsewhere.",
    errno.ENAMETOOLONG: "Choose a shorter name: ckpt writes hidden files with up to 50 bytes more beside it.",
    errno.EROFS: "The file system is read-only: write elsewhere.",
}
"""What helps if a target cannot be written, by the number of the system's error."""
_LOCKED = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextmanager
def lock(file: Path, error_if_locked: LockedError, required: bool = True) -> Iterator[None]:
    """Within, hold the lock of a file, which is created if it does not exist.

    Raises `error_if_locked` if another process holds it, `OutputError` if the file system cannot lock and a lock is
    `required`, `UnsafeError` if there is something else than a plain file.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        with suppress(FileNotFoundError):
            check_plain(os.lstat(file), file)
        raise unwritable(error, file) from error
    try:
        check_plain(os.fstat(descriptor), file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _LOCKED:
                raise error_if_locked from None
            if required:
                raise _unable(error, file) from error
        if not _is(file, descriptor):
            raise error_if_locked  # the process that had the lock has just removed or replaced the file
        yield
    finally:
        os.close(descriptor)


def check_folder_of(target: Path, what: str) -> None:
    """Raise `OutputError` unless the folder of a target, which is `what`, is there and may be written."""
    if not target.parent.is_dir():
        where, hint = target.parent, "Create it first."
        raise OutputError(f"the folder that should hold the {what} does not exist", where=where, hint=hint)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputError("no permission to write here", where=target.parent, hint="Choose another folder.")


def unwritable(error: OSError, place: Path) -> OutputError:
    """The error for a target that the system did not let us write, with the reason.

    It names the file of the system's error, but never a hidden draft, which becomes the target when it is complete.
    """
    where = error.filename if error.filename and not _is_hidden(Path(os.fsdecode(error.filename))) else place
    what = f"cannot be written: {error.strerror or error}"
    if error.errno in FULL:
        return NoSpaceError(what, where=where, hint="Free some space, or write elsewhere.")
    if isinstance(error, (StoreError, RenameError)):
        return OutputError(what, where=where, hint=error.hint)
    return OutputError(what, where=where, hint=_HINTS.get(error.errno or 0))


def _is_hidden(path: Path) -> bool:
    return any(part.endswith(PARTIAL) or is_draft(part) for part in path.parts)


def _unable(error: OSError, file: Path) -> OutputError:
    return OutputError(
        f"the file system here cannot lock files: {error.strerror}",
        where=file,
        hint="If no other process writes this target, give --no-lock; or choose a target on another file system.",
    )


def _is(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except OSError:
        return False
