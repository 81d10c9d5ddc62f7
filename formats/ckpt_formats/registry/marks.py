"""What is at a path if a format detects it: names and first bytes, as data.

`listed.FORMATS` has the marks of each. A format is imported only if one of its marks is there, because to import all
of them takes longer than to read a small checkpoint. Marks are necessary, not sufficient: `Format.detect` decides.
"""

import re
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.folders import entries_of


class Marks(NamedTuple):
    """The marks of a format; one of them is enough. In a pattern, `*` stands for any text."""

    paths: tuple[str, ...] = ()
    """Paths from a folder."""
    entries: tuple[str, ...] = ()
    """Patterns of the names in a folder, in lower case."""
    files: tuple[str, ...] = ()
    """Patterns of the name of a single file, in lower case."""
    starts: re.Pattern[bytes] | None = None
    """What the first bytes of a single file match."""


_START_NBYTES = 320


class PathMarks:
    """What is at a path: each thing is looked at once, and only if a mark needs it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def has_any(self, marks: Marks) -> bool:
        """Whether one of the marks of a format is there, so that it may detect the path. Never raises."""
        return (
            any(_may_exist(self._path / path) for path in marks.paths)
            or any(map(self._has_entry, marks.entries))
            or any(fnmatchcase(self._file_name, pattern) for pattern in marks.files)
            or (marks.starts is not None and self._start != b"" and marks.starts.match(self._start) is not None)
        )

    @cached_property
    def _entries(self) -> list[tuple[str, str]]:
        """The names in a folder, in lower case and as they are; none if it cannot be read."""
        try:
            return [(entry.name.lower(), entry.name) for entry in entries_of(self._path)]
        except CkptError:
            raise
        except (OSError, ValueError):  # ValueError: no path has a zero byte
            return []

    @cached_property
    def _file_name(self) -> str:
        """The name of a single file, in lower case; empty for anything else."""
        return self._path.name.lower() if self._path.is_file() else ""

    @cached_property
    def _start(self) -> bytes:
        """The first bytes of a single file; empty for anything else."""
        if not self._file_name:
            return b""
        try:
            with self._path.open("rb") as file:
                return file.read(_START_NBYTES)
        except CkptError:
            raise
        except OSError:
            return b""

    def _has_entry(self, pattern: str) -> bool:
        """Whether a name in the folder matches; after a slash, the pattern has the path of a file in that entry."""
        pattern, _, inner = pattern.partition("/")
        matching = (name for lower, name in self._entries if fnmatchcase(lower, pattern))
        return any(not inner or _may_exist(self._path / name / inner) for name in matching)


def _may_exist(path: Path) -> bool:
    """Whether there is something at a path; True also if that cannot be determined, so that the format reports why."""
    try:
        path.lstat()
    except CkptError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True
