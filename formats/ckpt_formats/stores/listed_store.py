"""A store of which all objects below one path were listed: what formats ask of paths needs no further request."""

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from threading import Lock
from typing import Any
from zlib import crc32

from ckpt_formats.core.store_path import FolderEntry
from ckpt_formats.stores.read_ahead import ReadAhead


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a listing says of an object."""

    nbytes: int
    e_tag: str
    modified: float
    """Seconds since 1970."""

    def condition(self) -> dict[str, Any]:
        """What a request demands, so that it is refused if the object is another one now."""
        if self.e_tag:
            return {"if_match": self.e_tag}
        return {"if_unmodified_since": datetime.fromtimestamp(self.modified, timezone.utc)}

    def status(self) -> os.stat_result:
        """As of a file. Its identity is that of the content, by the e_tag."""
        return object_status(crc32(self.e_tag.encode()), self.nbytes, self.modified)


def object_status(number: int, nbytes: int, modified: float) -> os.stat_result:
    """As of a file, for what is stored as objects. `number`: of its content; `modified`: in seconds."""
    mode, nanoseconds = stat.S_IFREG | 0o444, round(modified * 1e9)
    times = dict.fromkeys(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), nanoseconds)
    return os.stat_result((mode, number, 0, 1, 0, 0, nbytes, modified, modified, modified), times)


@dataclass(frozen=True, slots=True)
class StoredName:
    """A name in a folder of a store."""

    name: str
    folder: bool

    def is_dir(self) -> bool:
        return self.folder

    def is_file(self) -> bool:
        return not self.folder

    def is_symlink(self) -> bool:
        return False


class ListedStore(ABC):
    """A `Store`, of which the objects below one prefix are known. Threads may share it."""

    def __init__(self, url: str, objects: Mapping[str, StoredObject], root: str, unlisted: Sequence[str] = ()) -> None:
        """`objects`: all of those below the key `root`, or that object itself.

        `unlisted`: names of folders at the root, of which no object is known.
        """
        self._url, self._root = url, root
        self._objects = dict(objects)
        self._folders: dict[str, dict[str, bool]] = {}
        self._siblings: dict[str, dict[str, bool]] = {}
        self._singles: dict[str, StoredObject | None] = {}
        self._lock = Lock()
        self._process, self._blocks = os.getpid(), ReadAhead(self.get)
        for key in objects:
            _note(self._folders, key)
        for name in unlisted:
            self._folders.setdefault(root, {})[name] = True
            self._folders.setdefault(f"{root}/{name}" if root else name, {})

    @abstractmethod
    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of an object. Raises `CorruptError`, `IncompleteError` or `OSError`."""

    @abstractmethod
    def level(self, key: str) -> tuple[Mapping[str, StoredObject], list[str]]:
        """The objects in a folder that was not listed, and the names of the folders in it."""

    @property
    def url(self) -> str:
        return self._url

    def _single(self, key: str) -> StoredObject | None:
        """An object that was not listed; None if there is none, or if the store does not say."""
        return self.level(key.rpartition("/")[0])[0].get(key)

    def stat(self, key: str) -> os.stat_result:
        if (known := self._known(key)) is not None:
            return known.status()
        if not key or self._is_folder(key):
            return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        raise FileNotFoundError(errno.ENOENT, "there is no such object", f"{self._url}/{key}")

    def entry(self, key: str) -> StoredObject | None:
        """What the listing says of an object; None if there is none."""
        return self._known(key)

    def is_object(self, key: str) -> bool:
        return self._known(key) is not None

    def entries(self, key: str) -> list[FolderEntry]:
        if key in self._objects:
            raise NotADirectoryError(errno.ENOTDIR, "is an object, not a folder", f"{self._url}/{key}")
        names = self._names(key)
        if not names and self._is_above(key):  # it may not be listed, but it is there
            name, mark, _ = self._root[len(key) + 1 :].partition("/")
            names = {name: bool(mark) or self._root not in self._objects}
        if not names and key:
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", f"{self._url}/{key}")
        return [StoredName(name, folder) for name, folder in sorted(names.items())]

    @property
    def _ahead(self) -> ReadAhead:
        if self._process != os.getpid():  # the threads of the process that forked this one are not here
            self._process, self._blocks = os.getpid(), ReadAhead(self.get)
        return self._blocks

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        return self._ahead.read_into(key, self._objects[key].nbytes, offset, view)

    def request(self, key: str, offset: int, nbytes: int) -> None:
        self._ahead.request(key, self._objects[key].nbytes, offset, nbytes)

    def has(self, key: str, offset: int, nbytes: int) -> bool:
        return self._ahead.has(key, self._objects[key].nbytes, offset, nbytes)

    def keep(self, nbytes: int) -> None:
        self._ahead.keep(nbytes)

    def _known(self, key: str) -> StoredObject | None:
        """An object; a request is made for one that is not below the checkpoint, and for nothing else."""
        if key in self._objects or self._has_listed(key) or self._is_above(key):
            return self._objects.get(key)
        with self._lock:
            if key not in self._singles:
                self._singles[key] = one = self._single(key)
                if one is not None:
                    self._objects[key] = one
            return self._singles[key]

    def _is_folder(self, key: str) -> bool:
        return key in self._folders if self._has_listed(key) else self._is_above(key) or bool(self._names(key))

    def _is_above(self, key: str) -> bool:
        return self._root.startswith(f"{key}/")

    def _has_listed(self, key: str) -> bool:
        return not self._root or key == self._root or key.startswith(f"{self._root}/")

    def _names(self, key: str) -> dict[str, bool]:
        """The names in a folder, and whether each is a folder. One next to the checkpoint is listed when needed."""
        if self._has_listed(key):
            return self._folders.get(key, {})
        with self._lock:
            if key not in self._siblings:
                objects, folders = self.level(key)
                self._objects |= {path: one for path, one in objects.items() if path not in self._objects}
                names = {path.rpartition("/")[2]: False for path in objects}
                self._siblings[key] = names | dict.fromkeys(folders, True)
            return self._siblings[key]


def _note(folders: dict[str, dict[str, bool]], key: str) -> None:
    """Add an object, and the folders that its key implies."""
    above, _, name = key.rpartition("/")
    folders.setdefault(above, {})[name] = False
    while above:
        above, _, name = above.rpartition("/")
        names = folders.setdefault(above, {})
        if names.get(name):
            return
        names[name] = True
