"""Files that are in a store in several objects, because they grow while a run goes on: read as one.

A log of gradients grows by records, and objects do not grow. So what is new of `rank-00000.ckg` is put as a further
object: `rank-00000.ckg.part-00000000000000000000`, then `rank-00000.ckg.part-` and the byte where it begins, and so on.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any
from zlib import crc32

from ckpt_formats.core.store_path import FolderEntry, Store
from ckpt_formats.stores.listed_store import object_status

_PART = re.compile(r"(.+\.ckg)\.part-(\d{20})", re.DOTALL)


def part_name(file: str, begin: int) -> str:
    """The name of the object that has the bytes of a file from `begin` on."""
    return f"{file}.part-{begin:020d}"


def joined(store: Store, sizes: Mapping[str, int]) -> Store:
    """The store, with files for what is in parts. `sizes`: the bytes of all objects, by their keys."""
    begins = parts_of(sizes)
    return JoinedParts(store, begins) if begins else store


def parts_of(sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Where the parts of each file begin, and where the last one ends; those before the first gap."""
    parts: dict[str, list[int]] = {}
    for key in sorted(sizes):
        part = _PART.fullmatch(key)
        if part is None or part[1] in sizes:
            continue
        begins = parts.setdefault(part[1], [0])
        if begins[-1] == int(part[2]):
            begins.append(begins[-1] + sizes[key])
    return {file: begins for file, begins in parts.items() if len(begins) > 1}


class _JoinedFile:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_dir(self) -> bool:
        return False

    def is_file(self) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False


class JoinedParts:
    """A store in which files that are in parts are read as one. Their parts are not seen."""

    def __init__(self, store: Store, begins: Mapping[str, list[int]]) -> None:
        """`begins`: of each file, where its parts begin, and where the last one ends."""
        self._store: Any = store
        self._begins = begins

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._store, self._begins)

    @property
    def url(self) -> str:
        return str(self._store.url)

    @property
    def anonymous(self) -> bool:
        """As of the store."""
        return bool(getattr(self._store, "anonymous", False))

    def stat(self, key: str) -> os.stat_result:
        begins = self._begins.get(key)
        if begins is None:
            status: os.stat_result = self._store.stat(key)
            return status
        parts = [self._store.stat(part_name(key, begin)) for begin in begins[:-1]]
        number = crc32(repr([part.st_ino for part in parts]).encode())
        modified = max(part.st_mtime for part in parts)
        return object_status(number, begins[-1], modified)

    def is_object(self, key: str) -> bool:
        return key in self._begins or bool(self._store.is_object(key))

    def entries(self, key: str) -> list[FolderEntry]:
        own: list[FolderEntry] = self._store.entries(key)
        above = f"{key}/" if key else ""
        files: list[FolderEntry] = [
            _JoinedFile(file[len(above) :]) for file in self._begins if file.rpartition("/")[0] == key
        ]
        hidden = {one.name for one in files}
        shown = [one for one in own if (part := _PART.fullmatch(one.name)) is None or part[1] not in hidden]
        return sorted([*shown, *files], key=lambda one: one.name)

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        begins = self._begins.get(key)
        if begins is None:
            return int(self._store.read_into(key, offset, view))
        stop, done = min(offset + len(view), begins[-1]), 0
        while offset + done < stop:
            number = bisect_right(begins, offset + done) - 1
            begin, end = begins[number], min(begins[number + 1], stop)
            at = offset + done
            done += self._store.read_into(part_name(key, begin), at - begin, view[done : done + end - at])
        return done

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        """As of the store; of a file in parts by several requests."""
        if key not in self._begins:
            data: memoryview = self._store.get(key, offset, nbytes)
            return data
        buffer = memoryview(bytearray(nbytes))
        return buffer[: self.read_into(key, offset, buffer)]

    def request(self, key: str, offset: int, nbytes: int) -> None:
        """As of the store; nothing for a file in parts."""
        if key not in self._begins:
            self._store.request(key, offset, nbytes)

    def has(self, key: str, offset: int, nbytes: int) -> bool:
        """As of the store; not known of a file in parts."""
        return key not in self._begins and bool(self._store.has(key, offset, nbytes))

    def keep(self, nbytes: int) -> None:
        """As of the store."""
        self._store.keep(nbytes)
