"""A folder for files on their way to a store. One that a killed process left is removed by the next."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_formats.core.errors import Locked, OutputError
from ckpt_formats.core.locking import lock, unwritable

_PREFIX = "ckpt-scratch-"
_LOCK = ".lock"


@contextmanager
def scratch_folder(place: Path | None) -> Iterator[Path]:
    """A new folder in `place`, or where the system has temporary files; removed at the end. Raises `OutputError`."""
    where = Path(tempfile.gettempdir()) if place is None else place
    _sweep(where)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        data = folder / "data"
        data.mkdir()
    except OSError as error:
        raise unwritable(error, where) from error
    try:
        with lock(folder / _LOCK, Locked("another process uses this folder", where=folder), required=False):
            yield data
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove the folders of processes that ended without doing so. Their locks are free."""
    for folder in place.glob(f"{_PREFIX}*"):
        lock_file = folder / _LOCK
        with suppress(OutputError, Locked, OSError):
            if lock_file.is_file() and folder.lstat().st_uid == os.getuid():
                with lock(lock_file, Locked("in use", where=folder)):
                    shutil.rmtree(folder, ignore_errors=True)
