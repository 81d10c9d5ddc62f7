"""Paths of objects in a store.

A `StorePath` is a `Path`, so no format knows where its bytes lie. What would reach the operating system raises
`TypeError` instead, so nothing is read from or written to the local disk by mistake.
"""

import errno
import io
import os
import posixpath
import stat
import sys
from collections.abc import Callable, Generator
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath, PurePath
from typing import Any, NoReturn, Protocol, TypeGuard

from ckpt_formats.core.errors import CkptError

_BLOCK = 1 << 16
"""Bytes that a buffered file reads at once."""


class StoreError(OSError):
    """A store refuses a request, or cannot be reached: `strerror` is for the user, and so is the hint."""

    def __init__(self, text: str, where: str, hint: str | None = None, is_denied: bool = False) -> None:
        super().__init__(errno.EIO, text, where)
        self.strerror: str = text
        self.hint = hint
        self.is_denied = is_denied
        """Whether there are no credentials, or none that allow it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.strerror, self.filename, self.hint, self.is_denied)


class FolderEntry(Protocol):
    """A name in a folder, such as `os.scandir` gives."""

    @property
    def name(self) -> str: ...

    def is_dir(self) -> bool: ...

    def is_file(self) -> bool: ...

    def is_symlink(self) -> bool: ...


class Store(Protocol):
    """Objects by keys such as `runs/step-10/model.safetensors`. A prefix that ends before a slash is a folder.

    All raise `StoreError` if the store cannot be reached or refuses.
    """

    @property
    def url(self) -> str:
        """`s3://bucket`, without a slash at the end."""

    def stat(self, key: str) -> os.stat_result:
        """An object or a folder. Raises `FileNotFoundError` if there is neither."""

    def is_object(self, key: str) -> bool:
        """Whether there is an object of this key: to know this, no folder is listed."""

    def entries(self, key: str) -> list[FolderEntry]:
        """The names in a folder, sorted. Raises `FileNotFoundError`, `NotADirectoryError`."""

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        """Fill `view` from byte `offset` on; the bytes that there were: fewer only at the end of the object.

        Raises `OSError` if the object is not the one that was listed.
        """

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of an object, in one request. Raises as `read_into`."""

    def request(self, key: str, offset: int, nbytes: int) -> None:
        """Request a small range that `read_into` will read soon, and do not wait for it."""

    def has(self, key: str, offset: int, nbytes: int) -> bool:
        """Whether `read_into` will give this range without a request, or with one that is on its way."""

    def keep(self, nbytes: int) -> None:
        """Keep at most so many bytes of blocks that small reads share."""


class StorePath(PosixPath):
    """The path of an object, or of a folder of objects, in a store.

    Its key has no part that is `.`, `..` or empty: no folder in a store is a link, so each key that has some names a
    plain one.
    """

    def __new__(cls, store: Store, key: str = "") -> "StorePath":
        return super().__new__(cls, _pure(store, _plain(key)))

    def __init__(self, store: Store, key: str = "") -> None:
        self.store = store
        self.key = _plain(key)
        if sys.version_info >= (3, 12):
            super().__init__(_pure(store, self.key))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.key)

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is in an object store, not in the file system")

    def __hash__(self) -> int:
        return hash((self.store.url, self.key))

    def __eq__(self, other: object) -> bool:
        return is_remote(other) and (self.store.url, self.key) == (other.store.url, other.key)

    def __lt__(self, other: PurePath) -> bool:
        return self.key < other.key if is_remote(other) else NotImplemented

    # Paths from paths. `pathlib` computes them without the store.

    def _at(self, key: str) -> "StorePath":
        return StorePath(self.store, key)

    def with_segments(self, *segments: Any) -> Path:
        return Path(*segments)

    def joinpath(self, *others: Any) -> "StorePath":
        return self._at(posixpath.join(self.key, *map(str, others)))

    def __truediv__(self, other: Any) -> "StorePath":
        return self.joinpath(other)

    @property
    def parent(self) -> "StorePath":
        return self._at(self.key.rpartition("/")[0])

    @property
    def parents(self) -> tuple["StorePath", ...]:
        above, key = [], self.key
        while key:
            key = key.rpartition("/")[0]
            above.append(self._at(key))
        return tuple(above)

    def with_name(self, name: str) -> "StorePath":
        return self.parent / name

    def with_suffix(self, suffix: str) -> "StorePath":
        return self.with_name(self.stem + suffix)

    def relative_to(self, other: Any, *more: Any, **named: Any) -> Path:  # type: ignore[override]
        if not self.is_relative_to(other):
            raise ValueError(f"{self} is not in {other}")
        return Path(self.key[len(other.key) :].lstrip("/"))

    def is_relative_to(self, other: Any, *more: Any) -> bool:
        if not is_remote(other) or other.store.url != self.store.url:
            return False
        return not other.key or self.key == other.key or self.key.startswith(f"{other.key}/")

    def absolute(self) -> "StorePath":
        return self

    def resolve(self, strict: bool = False) -> "StorePath":
        return self

    # What the store says of a path.

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self.store.stat(self.key)

    def lstat(self) -> os.stat_result:
        return self.stat()

    def exists(self, **named: Any) -> bool:
        return self._has_mode(lambda mode: True)

    def is_file(self, **named: Any) -> bool:
        return self.store.is_object(self.key)

    def is_dir(self, **named: Any) -> bool:
        return self._has_mode(stat.S_ISDIR)

    def is_symlink(self) -> bool:
        return False

    def _has_mode(self, is_kind: Callable[[int], bool]) -> bool:
        try:
            return is_kind(self.stat().st_mode)
        except CkptError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            return False

    def entries(self) -> list[FolderEntry]:
        """The names in a folder. Raises `FileNotFoundError`, `NotADirectoryError`."""
        return self.store.entries(self.key)

    def iterdir(self) -> Generator["StorePath", None, None]:
        return (self / entry.name for entry in self.entries())

    def glob(self, pattern: str, **named: Any) -> Generator["StorePath", None, None]:
        """The entries whose names match; the pattern is that of one name."""
        if "/" in pattern or "**" in pattern:
            raise NotImplementedError(f"the pattern {pattern!r} of several folders")
        entries = self.entries() if self.is_dir() else []
        return (self / entry.name for entry in entries if fnmatchcase(entry.name, pattern))

    def rglob(self, pattern: str, **named: Any) -> Generator["StorePath", None, None]:
        for entry in self.entries():
            path = self / entry.name
            if fnmatchcase(entry.name, pattern):
                yield path
            if entry.is_dir():
                yield from path.rglob(pattern)

    def open(self, mode: str = "rb", *rest: Any, **named: Any) -> Any:
        if mode != "rb":
            raise TypeError(f"{self} is in an object store: it can only be read")
        return ObjectFile(self).stream()

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return bytes(file.read())

    def read_text(self, encoding: str | None = None, *rest: Any, **named: Any) -> str:
        return self.read_bytes().decode(encoding or "utf-8")


def is_remote(path: object) -> TypeGuard[StorePath]:
    """Whether a path is in a store. Each read of it is a request, which costs time and money."""
    return isinstance(path, StorePath)


def request(path: Path, offset: int, nbytes: int) -> None:
    """Announce a small read that comes soon: a store is asked for the bytes now, a file system needs no notice."""
    if is_remote(path):
        path.store.request(path.key, offset, nbytes)


def is_same_path(path: Path, other: Path) -> bool:
    """Whether both are the same file or folder. `path` exists."""
    if is_remote(path) or is_remote(other):
        return path == other
    return other.exists() and os.path.samefile(path, other)


def relative_path(path: Path, folder: Path) -> str | None:
    """`path` as seen from a folder, both resolved; None unless both are in one file system, or in one bucket."""
    if is_remote(folder) and is_remote(path):
        return posixpath.relpath(f"/{path.key}", f"/{folder.key}") if path.store.url == folder.store.url else None
    return None if is_remote(folder) or is_remote(path) else os.path.relpath(path, folder)


def _plain(key: str) -> str:
    """A key without parts that are `.`, `..` or empty."""
    key = f"/{key}"
    return (posixpath.normpath(key) if "/." in key or "//" in key else key).strip("/")


def _pure(store: Store, key: str) -> str:
    """The path that `pathlib` computes names and suffixes from: a revision is no part of a repository's name."""
    place, _, revision = store.url.partition("@")
    return f"/{revision}/{place}/{key}"


class ObjectFile:
    """An object of a store."""

    def __init__(self, path: StorePath) -> None:
        self._store, self._key = path.store, path.key
        self.status = self._store.stat(self._key)

    def read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        return bytes(data[: self.read_into(offset, memoryview(data))])

    def read_into(self, offset: int, view: memoryview) -> int:
        return self._store.read_into(self._key, offset, view)

    def stream(self) -> "io.BufferedReader[Any]":
        """The object as a file with a position, which reads blocks."""
        return io.BufferedReader(_RawObject(self), _BLOCK)

    def close(self) -> None:
        """Nothing is open between two requests."""


class _RawObject(io.RawIOBase):
    """An object as a file with a position."""

    def __init__(self, file: ObjectFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.status.st_size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        read = self._file.read_into(self._at, memoryview(buffer).cast("B"))
        self._at += read
        return read
