"""A folder of the file system as a place: files that appear by one rename, and locks that end with their process."""

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import ClassVar

from ckpt_formats.core import locking
from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import LockedError
from ckpt_formats.core.own_folder import create_own, draft_name, is_draft, read_own
from ckpt_formats.core.place import ObjectEntry, Place, Version, absent, ends_early, too_large
from ckpt_formats.core.publish import flush, flush_or_remove, rename_new
from ckpt_formats.core.publish import replace as rename_over

_SHORTEST, _LONGEST = 0.001, 0.05
"""Seconds between two looks at a file that may be replaced: twice as long each time."""


@dataclass(frozen=True, slots=True)
class _FileEntry:
    """What the file system says of a file."""

    nbytes: int
    modified: float
    e_tag: str = ""


@dataclass(frozen=True)
class FolderPlace(Place):
    """The files in a folder."""

    look_seconds: ClassVar[float] = 1.0
    batch_seconds: ClassVar[float] = 0.0
    can_append: ClassVar[bool] = True
    is_consistent: ClassVar[bool] = True

    folder: Path
    is_own: bool = False
    """Whether only this user should be able to write it (`core.own_folder`): then links and pipes in it are refused."""
    descriptor: int | None = None
    """Of the folder, if it is open (`opened`)."""

    @property
    def local(self) -> Path:
        return self.folder

    def within(self, name: str) -> "FolderPlace":
        return FolderPlace(self.folder / name, self.is_own)

    def absolute(self) -> "FolderPlace":
        return replace(self, folder=self.folder.absolute())

    def where(self, key: str = "") -> str:
        return str(self.folder / key) if key else str(self.folder)

    def list(self) -> dict[str, _FileEntry]:
        """No link is followed."""
        files = dict[str, _FileEntry]()
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and not is_draft(name):
                        files[path.relative_to(self.folder).as_posix()] = _FileEntry(status.st_size, status.st_mtime)
        return files

    def head(self, key: str) -> _FileEntry | None:
        try:
            status = (self.folder / key).stat(follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _FileEntry(status.st_size, status.st_mtime)

    def read(self, key: str, max_nbytes: int = MAX_LIST) -> tuple[bytes, Version] | None:
        path = self.folder / key
        try:
            data, status = read_own(path, max_nbytes) if self.is_own else _read(path, max_nbytes)
        except FileNotFoundError:
            return None
        if len(data) > max_nbytes:
            raise too_large(status.st_size, max_nbytes, str(path))
        return data, _version(status)

    def read_range(self, key: str, offset: int, nbytes: int) -> memoryview:
        path = self.folder / key
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size < offset + nbytes:
                raise ends_early(size, offset + nbytes, str(path))
            data, at = memoryview(bytearray(nbytes)), 0
            file.seek(offset)
            while at < nbytes:
                part = file.readinto(data[at:])
                if not part:
                    raise ends_early(offset + at, offset + nbytes, str(path))
                at += part
        return data

    def read_if_changed(
        self, key: str, version: Version, max_nbytes: int = MAX_LIST, seconds: float = 0.0
    ) -> tuple[bytes, Version] | None:
        end, pause = time.monotonic() + seconds, _SHORTEST
        while self._version(key) == version:
            remaining = end - time.monotonic()
            if remaining <= 0:
                return None
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _LONGEST)
        read = self.read(key, max_nbytes)
        if read is None:
            raise absent(self.where(key))
        return read

    def create(self, key: str, data: bytes) -> Version:
        draft = self._draft(key, data)
        version = _version(draft.stat())  # before it has its name: then others may replace it
        try:
            rename_new(draft, self.folder / key)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return version

    def append(self, key: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self.folder / key, flags, 0o644), "ab") as file:
            file.write(data)

    def create_from(
        self, key: str, file: Path, check: Callable[[], None], parts_at_once: int = 4, tag: str | None = None
    ) -> str:
        flush_or_remove(file)
        check()
        for folder in reversed(PurePath(key).parents[:-1]):
            with suppress(FileExistsError):
                os.mkdir(folder, dir_fd=self.descriptor)
        if self._size(key) is not None:
            raise FileExistsError
        os.replace(file, key, dst_dir_fd=self.descriptor)
        return ""

    def replace_from(self, key: str, file: Path, there: ObjectEntry | None) -> None:
        flush(file)
        if self.head(key) != there:
            raise FileExistsError
        rename_over(file, self.folder / key)
        flush((self.folder / key).parent)

    def tag_if_equal(self, key: str, file: Path) -> str | None:
        """What has its final name is complete, and only the same job writes into this folder: sizes are compared."""
        return "" if self._size(key) == file.stat().st_size else None

    def replace(self, key: str, data: bytes, version: Version | None) -> Version:
        if self._version(key) != version:
            raise FileExistsError
        draft = self._draft(key, data)
        new = _version(draft.stat())
        try:
            flush(draft)
            (rename_new if version is None else rename_over)(draft, self.folder / key)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        flush(self.folder)
        return new

    def replace_stale(self, key: str, data: bytes, version: Version) -> Version:
        # The file is moved aside before it is known to be the stale one: if it is not, it is moved back.
        aside = self._draft_path(key)
        try:
            os.rename(self.folder / key, aside)
        except FileNotFoundError:
            raise FileExistsError from None
        try:
            if _version(aside.stat()) != version:
                with suppress(FileExistsError):
                    rename_new(aside, self.folder / key)
                raise FileExistsError
            return self.create(key, data)
        finally:
            aside.unlink(missing_ok=True)

    def renew(self, key: str, data: bytes, version: Version) -> Version:
        file = os.open(self.folder / key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _version(os.fstat(file)) != version:
                raise FileExistsError
            os.utime(file)
            return _version(os.fstat(file))
        finally:
            os.close(file)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self.folder / key).unlink(missing_ok=True)

    def remove(self, names: Iterable[str], first: str) -> None:
        import shutil  # it imports all compressors, and a command that reads removes nothing

        for name in names:
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                (path / first).unlink(missing_ok=True)
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def remove_drafts(self, key: str) -> None:
        path = self.folder / key
        for draft in path.parent.glob(f".{path.name}-*"):
            if is_draft(draft.name):
                draft.unlink(missing_ok=True)

    def truncate(self, key: str, nbytes: int) -> None:
        os.truncate(self.folder / key, nbytes)

    def now(self) -> float:
        draft = self._draft("clock", b"")
        try:
            return draft.stat().st_mtime
        finally:
            draft.unlink(missing_ok=True)

    @contextmanager
    def opened(self) -> Iterator["FolderPlace"]:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield replace(self, descriptor=descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def lock(self, key: str, error: LockedError, required: bool) -> Iterator[bool]:
        with locking.lock(self.folder / key, error, required):
            yield True

    def ignored_condition(self, key: str, version: Version, data: bytes) -> None:
        return None

    def _draft(self, key: str, data: bytes) -> Path:
        """A new file with this content, under a name that no other process uses."""
        draft = self._draft_path(key)
        with open(create_own(draft), "wb") as file:
            file.write(data)
        return draft

    def _draft_path(self, key: str) -> Path:
        path = self.folder / key
        return path.with_name(draft_name(path.name))

    def _version(self, key: str) -> Version | None:
        try:
            return _version((self.folder / key).stat())
        except FileNotFoundError:
            return None

    def _size(self, key: str) -> int | None:
        try:
            return os.stat(key, dir_fd=self.descriptor, follow_symlinks=False).st_size
        except FileNotFoundError:
            return None


def _version(status: os.stat_result) -> Version:
    return Version(f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}")


def _read(path: Path, max_nbytes: int) -> tuple[bytes, os.stat_result]:
    """The content of a file, or its first `max_nbytes` + 1 bytes."""
    with path.open("rb") as file:
        return file.read(max_nbytes + 1), os.fstat(file.fileno())
