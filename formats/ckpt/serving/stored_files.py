"""The files of a chain in a bucket, as `chain_files` has those of a folder: streamed through, a block at a time."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from ckpt.serving.chain_files import ChainFiles, FileVersion, Lifetime, OpenedFile, absent_file, is_plain
from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CkptError, NotFoundError
from ckpt_formats.core.place import ObjectEntry, Place, Version
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex
from ckpt_formats.universal.published.records import HEAD, MAX_HEAD

T = TypeVar("T")
_BLOCK = 4 << 20
"""Bytes of one request to the bucket, and in memory for each reader."""
_LOOK_SECONDS = 0.2
"""From one look at a file that is replaced to the next, for all readers together: a look costs a request."""
_MAX_KNOWN = 100_000
"""Files that are never replaced, of which the server remembers the sizes."""
_SMALL = {HEAD: MAX_HEAD, chain_file.NAME: MAX_LIST}
"""Files that are read as a whole, with the most bytes that they may have."""


@dataclass(frozen=True)
class _Content:
    """What a small file had, and when that was read."""

    data: bytes
    version: Version
    read_at: float


class StoredChainFiles(ChainFiles):
    """The files of a chain in a bucket. Threads may share it."""

    def __init__(self, place: Place) -> None:
        """Raises `NotFoundError` if there is no chain, `CkptError` if the bucket cannot be read."""
        self.place = place
        self._lock = threading.Lock()
        self._contents: dict[str, _Content] = {}
        self._known: dict[str, ObjectEntry] = {}
        super().__init__(Path(place.where()))

    def open(self, name: str) -> OpenedFile:
        lifetime = self._lifetime(name)
        if name in _SMALL:
            content = self._content(name)
            return _Opened(self, name, lifetime, _version(len(content.data), content.version.e_tag), content.data)
        entry = self._known.get(name)
        if entry is None:
            entry = self._request(lambda: self.place.head(name))
            if entry is None:
                raise absent_file()
            if lifetime is Lifetime.IMMUTABLE and len(self._known) < _MAX_KNOWN:
                self._known[name] = entry
        # Nothing is appended to an object: what grows in a folder is replaced here.
        lifetime = Lifetime.REPLACED if lifetime is Lifetime.GROWING else lifetime
        return _Opened(self, name, lifetime, _version_of(entry), None)

    def read(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes of a file. Raises as `__init__`, and if the file has fewer."""
        return self._request(lambda: self.place.read_range(name, begin, end - begin))

    def is_still(self, name: str, version: FileVersion) -> bool:
        """Whether a file is of this version now."""
        entry = self._request(lambda: self.place.head(name))
        return entry is not None and _version_of(entry) == version

    def _versions(self, root: str) -> Iterator[tuple[str, FileVersion]]:
        if root == chain_file.NAME:
            content = self._content(root)
            yield root, _version(len(content.data), content.version.e_tag)
            return
        for name, entry in self._request(self.place.within(root).list).items():
            if is_plain(f"{root}/{name}"):
                yield f"{root}/{name}", _version_of(entry)

    def _index(self) -> ChainIndex:
        content = self._content(chain_file.NAME)
        tag, seen = _version(len(content.data), content.version.e_tag).e_tag, self._seen
        if seen is None or seen[0] != tag:
            seen = self._seen = (tag, chain_file.parse(content.data, self.folder / chain_file.NAME))
        return seen[1]

    def _content(self, name: str) -> _Content:
        """A small file as it is now, or was within the last look."""
        with self._lock:
            content, now = self._contents.get(name), time.monotonic()
            if content is not None and now - content.read_at < _LOOK_SECONDS:
                return content
            try:
                if content is None:
                    there = self._request(lambda: self.place.read(name, _SMALL[name]))
                    if there is None:
                        raise FileNotFoundError
                else:
                    version = content.version
                    there = self._request(lambda: self.place.read_if_changed(name, version, _SMALL[name]))
            except FileNotFoundError:
                self._contents.pop(name, None)
                if name == chain_file.NAME:
                    raise NotFoundError("the chain is gone, or there is none", where=self.place.where()) from None
                raise absent_file() from None
            if there is not None:
                content = _Content(*there, now)
            elif content is not None:
                content = _Content(content.data, content.version, now)
            assert content is not None
            self._contents[name] = content
            return content

    def _request(self, request: Callable[[], T]) -> T:
        """What a request returns; an error of the bucket is one of the server, not of the reader's connection."""
        try:
            return request()
        except (CkptError, FileNotFoundError):
            raise
        except OSError as error:
            raise CkptError(f"the bucket cannot be read: {error}", where=self.place.where()) from error


@dataclass(frozen=True, eq=False)
class _Opened(OpenedFile):
    files: StoredChainFiles
    name: str
    lifetime: Lifetime
    version: FileVersion
    data: bytes | None
    """All bytes of a small file."""

    def blocks(self, begin: int, end: int) -> Iterator[bytes | memoryview]:
        if self.data is not None:
            yield self.data[begin:end]
            return
        for at in range(begin, end, _BLOCK):
            block = self.files.read(self.name, at, min(at + _BLOCK, end))
            is_last = at + _BLOCK >= end
            if is_last and self.lifetime is Lifetime.REPLACED and not self.files.is_still(self.name, self.version):
                return  # the reader sees that bytes are missing
            yield block

    def close(self) -> None:
        pass


def _version_of(entry: ObjectEntry) -> FileVersion:
    return _version(entry.nbytes, entry.e_tag or str(entry.modified))


def _version(nbytes: int, e_tag: str | None) -> FileVersion:
    return FileVersion(nbytes, f'"{xxhash.xxh3_64_hexdigest(f"{nbytes} {e_tag}".encode())}"')
