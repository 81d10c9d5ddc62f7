"""A folder for files on their way to a store. One that a killed process left is removed by the next."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckpt_formats.core.errors import LockedError, OutputError
from ckpt_formats.core.locking import lock, unwritable
from ckpt_formats.core.own_folder import is_own

_PREFIX = "ckpt-scratch-"
_LOCK = ".lock"
_TRIES = 10


@contextmanager
def scratch_folder(place: Path | None) -> Iterator[Path]:
    """A new folder in `place`, or where the system has temporary files; removed at the end. Raises `OutputError`."""
    where = Path(tempfile.gettempdir()) if place is None else place
    _sweep(where)
    with ExitStack() as stack:
        for left in reversed(range(_TRIES)):
            try:
                data = _locked_folder(where, stack)
                break
            except LockedError:  # another process has just swept it, before it was locked
                if not left:
                    raise
        yield data


def _locked_folder(where: Path, stack: ExitStack) -> Path:
    """The part for data of a new folder, which is removed, and then unlocked, when the stack is left."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        (folder / "data").mkdir()
    except OSError as error:
        raise unwritable(error, where) from error
    locked = LockedError("another process uses this folder", where=folder)
    try:
        stack.enter_context(lock(folder / _LOCK, locked, required=False))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder / "data"


def _sweep(place: Path) -> None:
    """Remove the folders of processes that ended without doing so. Their locks are free."""
    for folder in place.glob(f"{_PREFIX}*"):
        lock_file = folder / _LOCK
        with suppress(OutputError, LockedError, OSError):
            if lock_file.is_file() and is_own(folder, _LOCK):
                with lock(lock_file, LockedError("in use", where=folder)):
                    shutil.rmtree(folder, ignore_errors=True)
