"""A growing file of records. It ends with a complete record even after a failure."""

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_codecs.base import Bytes
from ckpt_formats.universal.gradients.record import FileHead, Kind, record_parts

_MAX_PARTS = 512
"""The maximum number of parts in one `writev`; the system allows 1,024."""


class RecordFile:
    """A new file, locked until it is closed: that shows others that this run continues.

    Attributes:
        descriptor: The open file.
        nbytes: The size of all records.
    """

    def __init__(self, path: Path, head: FileHead) -> None:
        """Create the file and write its head. Raises `OSError`."""
        self._path = path
        self.descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)  # others take the lock briefly to check
        content = head.dump()
        self.nbytes, self._previous = 0, int.from_bytes(content[56:], "little")
        self._write([content])

    def append(self, kind: Kind, step: int, meta: dict[str, Any], chunks: Sequence[Bytes], values: list[int]) -> None:
        """Add a record. `values`: the XXH3-64 of the values of each chunk.

        Raises `OSError`, and then leaves the file unchanged.
        """
        parts, previous = record_parts(kind, step, meta, chunks, values, self._previous)
        self._write(parts)
        self._previous = previous

    def close(self) -> None:
        """Close the file, which ends its lock."""
        os.close(self.descriptor)

    def check_path(self) -> None:
        """Raise `OSError` if the path of the file is no longer that of this file: others would not find its records."""
        try:
            same = os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self.descriptor))
        except (FileNotFoundError, NotADirectoryError):
            same = False
        if not same:
            place = os.sep.join(self._path.parts[-3:])
            raise OSError(errno.ENOENT, f"{place} was removed, renamed or replaced while it was written")

    def _write(self, parts: Sequence[Bytes]) -> None:
        end = self.nbytes
        try:
            for i in range(0, len(parts), _MAX_PARTS):
                end += _write_all(self.descriptor, parts[i : i + _MAX_PARTS], end)
        except OSError:
            os.ftruncate(self.descriptor, self.nbytes)
            raise
        self.nbytes = end


def _write_all(file: int, parts: Sequence[Bytes], offset: int) -> int:
    total = sum(len(part) for part in parts)
    done = os.pwritev(file, parts, offset)
    if done < total:  # the disk is nearly full, or a signal arrived
        remaining = memoryview(b"".join(parts))[done:]
        while remaining:
            count = os.pwrite(file, remaining, offset + done)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            remaining, done = remaining[count:], done + count
    return total
