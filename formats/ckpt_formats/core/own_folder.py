"""Folders of ckpt that only this user may change: where targets grow, and what ckpt notes beside them.

In a folder that several users can write, another one may make such a folder first, or put links, pipes and second
names of this user's files into it. What ckpt then writes would end in a file that has nothing to do with it, and what
it reads would be somebody else's word. So a folder is this user's, with plain files and folders in it, or refused.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CkptError, UnsafeError

_GROUP_AND_OTHERS, _WRITABLE_BY_OTHERS = 0o077, 0o022
_ROOT = 0
_DRAFT = ".draft"
"""The ending of the name of a file that has another name soon. Without `renameat2`, it has both for a moment."""
_HINT = "Remove it if nobody needs it, or choose a target in a folder that only you can write."


def make_own(folder: Path, *names: str) -> None:
    """Make a folder that only this user can read or write; check one that is there, as `check_own`.

    `names`: what ckpt puts into it first of all. A folder with content, but none of these, is not of ckpt.
    Raises `UnsafeError`, `OSError`.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        check_own(folder, *names)


def is_own(folder: Path, *names: str) -> bool:
    """Whether ckpt, run by this user, has made a folder, which may be removed then. `names`: as of `make_own`."""
    try:
        with _opened(folder) as descriptor:
            _check_owner(os.fstat(descriptor), folder)
            _check_names(descriptor, folder, names)
    except (CkptError, OSError):
        return False
    return True


def check_own(folder: Path, *names: str) -> None:
    """Raise `UnsafeError` unless a folder is this user's, and holds plain files and folders of this user only.

    Others lose the permission to read it. If others could write it before, it is refused. `names`: as of `make_own`.
    Raises `FileNotFoundError`.
    """
    with _opened(folder) as descriptor:
        status = os.fstat(descriptor)
        owners = _check_owner(status, folder)
        if not status.st_mode & _GROUP_AND_OTHERS:
            _check_tree(descriptor, folder, owners)
            _check_names(descriptor, folder, names)
            return
        with suppress(OSError):  # a file system without modes
            os.fchmod(descriptor, 0o700)
        try:
            writable = 0 if _is_modeless(folder.parent) else _WRITABLE_BY_OTHERS
            _check_mode(status, folder, writable)
            _check_tree(descriptor, folder, owners, writable)
            _check_names(descriptor, folder, names)
        except UnsafeError:
            with suppress(OSError):
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode))  # or it would look safe the next time
            raise


def read_own(path: Path, max_nbytes: int = MAX_LIST) -> tuple[bytes, os.stat_result]:
    """The content of a plain file of a folder that is this user's, or its first `max_nbytes` + 1 bytes.

    No link is followed, and no pipe waited for.

    Raises `UnsafeError`, `OSError`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        with suppress(FileNotFoundError):
            check_plain(os.lstat(path), path)  # says what it is instead of a file
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        check_plain(status, path, has_draft=_has_draft(path, status))
        return file.read(max_nbytes + 1), status


def create_own(path: Path) -> int:
    """Create a file, open for reading and writing. What had its name is removed, never written. Raises `OSError`."""
    while True:
        with suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with suppress(FileNotFoundError):
            os.unlink(path)


def draft_name(name: str) -> str:
    """A name for a file that `name` becomes when it is whole: hidden, and used by no other process."""
    return f".{name}-{uuid4().hex}{_DRAFT}"


def is_draft(name: str) -> bool:
    """Whether `draft_name` makes such names."""
    return name.startswith(".") and name.endswith(_DRAFT)


def check_plain(status: os.stat_result, path: Path, has_draft: bool = False) -> None:
    """Raise `UnsafeError` unless a path is a folder, or a plain file without another name."""
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeError(f"is {_kind(status)}; ckpt needs a file of its own here", where=path, hint=_HINT)
    if status.st_nlink > (2 if has_draft else 1):
        raise UnsafeError("is a file with another name elsewhere (a hard link)", where=path, hint=_HINT)


def _has_draft(path: Path, status: os.stat_result) -> bool:
    """Whether a file has a second name, which is that of its draft, or has just been removed."""
    if status.st_nlink < 2:
        return False
    final = path.name[1:].rpartition("-")[0] if is_draft(path.name) else path.name
    for other in path.parent.iterdir():
        with suppress(FileNotFoundError):
            is_pair = other.name == final or (other.name.startswith(f".{final}-") and is_draft(other.name))
            if other != path and is_pair and os.path.samestat(other.lstat(), status):
                return True
    return path.lstat().st_nlink < 2


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode):
            raise UnsafeError(f"is {_kind(status)}; ckpt needs a folder here", where=folder, hint=_HINT) from None
        _check_owner(status, folder)
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_names(descriptor: int, folder: Path, names: tuple[str, ...]) -> None:
    inside = os.listdir(descriptor)
    if inside and names and not any(name.startswith(names) for name in inside):
        raise UnsafeError("ckpt needs this name, but did not make this folder", where=folder, hint=_HINT)


def _check_owner(status: os.stat_result, folder: Path) -> set[int]:
    """Return the users of whom files in a folder may be. Raises `UnsafeError` if the folder is of another one."""
    owners = {os.geteuid(), _ROOT}
    if status.st_uid not in owners:
        owners.add(_of_new_folder(folder.parent).st_uid)  # some file systems give all files to one user
    if status.st_uid not in owners:
        raise _foreign(status, folder)
    return owners


def _foreign(status: os.stat_result, path: Path) -> UnsafeError:
    return UnsafeError(f"belongs to another user (uid {status.st_uid})", where=path, hint=_HINT)


def _check_tree(descriptor: int, folder: Path, owners: set[int], refused: int = 0) -> None:
    """Check all that is below a folder. `refused`: the bits of modes that nothing may have."""
    for place, folders, files, here in os.fwalk(".", dir_fd=descriptor):
        for name in (*folders, *files):
            path = folder / place / name
            with suppress(FileNotFoundError):  # another process of this user has removed it
                status = os.stat(name, dir_fd=here, follow_symlinks=False)
                check_plain(status, path, has_draft=_has_draft(path, status))
                if status.st_uid not in owners:
                    raise _foreign(status, path)
                _check_mode(status, path, refused)


def _check_mode(status: os.stat_result, path: Path, refused: int) -> None:
    if status.st_mode & refused:
        mode = stat.S_IMODE(status.st_mode)
        raise UnsafeError(f"other users could write it (mode {mode:04o})", where=path, hint=_HINT)


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")


def _is_modeless(parent: Path) -> bool:
    """Whether a file system gives all folders a mode by which others can write them."""
    return bool(_of_new_folder(parent).st_mode & _WRITABLE_BY_OTHERS)


def _of_new_folder(parent: Path) -> os.stat_result:
    """What the file system notes of a folder that this process makes."""
    import tempfile  # few file systems need it

    trial = tempfile.mkdtemp(prefix=".ckpt-owner-", dir=parent)
    try:
        return os.lstat(trial)
    finally:
        os.rmdir(trial)
