"""What belongs to a chain in a folder, and may be served: no other file, and no link."""

import os
import socket
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ckpt_formats.core.errors import CkptError, NotFoundError
from ckpt_formats.core.own_folder import is_draft
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex

MAX_FILES = 500_000
"""The maximum number of files in a listing."""
_MAX_DEPTH = 6
_PUBLISHED = "published"
_CREATED_ONCE = ("objects", "steps", "folds")
"""Folders of a published chain in which no object is ever replaced."""


class Lifetime(Enum):
    """How the file of a name changes."""

    IMMUTABLE = "never"
    REPLACED = "as a whole"
    GROWING = "at its end"


@dataclass(frozen=True)
class FileVersion:
    """A version of a file."""

    nbytes: int
    e_tag: str

    @classmethod
    def of(cls, status: os.stat_result, lifetime: Lifetime) -> "FileVersion":
        """The version of a file of this status. Of one that grows, the e_tag stays the same."""
        parts = [status.st_ino]
        if lifetime is not Lifetime.GROWING:
            parts += [status.st_size, status.st_mtime_ns]
        return cls(status.st_size, f'"{"-".join(f"{one:x}" for one in parts)}"')


class OpenedFile(ABC):
    """A file of a chain that is being sent."""

    version: FileVersion
    lifetime: Lifetime

    @abstractmethod
    def blocks(self, begin: int, end: int) -> Iterator[bytes | memoryview]:
        """The bytes in a range, in blocks. Fewer if the file is another one now."""

    def send(self, connection: socket.socket, begin: int, end: int) -> bool:
        """Send a range of bytes. Returns False if the file has fewer of them now. Raises `OSError`, `CkptError`."""
        sent = 0
        for block in self.blocks(begin, end):
            connection.sendall(block)
            sent += len(block)
        return sent == end - begin

    @abstractmethod
    def close(self) -> None:
        """Free what is open."""


@dataclass(frozen=True, eq=False)
class _FolderFile(OpenedFile):
    descriptor: int
    version: FileVersion
    lifetime: Lifetime

    def blocks(self, begin: int, end: int) -> Iterator[bytes]:
        yield os.pread(self.descriptor, end - begin, begin)

    def send(self, connection: socket.socket, begin: int, end: int) -> bool:
        with open(self.descriptor, "rb", buffering=0, closefd=False) as file:
            return connection.sendfile(file, begin, end - begin) == end - begin

    def close(self) -> None:
        os.close(self.descriptor)


class ChainFiles:
    """The files of a chain in a folder, by names with `/` between folders. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises `NotFoundError` if there is not a chain."""
        self.folder = folder
        self._seen: tuple[str, ChainIndex] | None = None
        self._index()

    def open(self, name: str) -> OpenedFile:
        """A file, open for reading. Raises `NotFoundError` if it is none to be served.

        No folder on the way to it is a link.
        """
        lifetime = self._lifetime(name)
        *folders, last = name.split("/")
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for one in folders:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(one, flags, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
        except (OSError, ValueError):
            raise absent_file() from None
        finally:
            os.close(descriptor)
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            os.close(file)
            raise absent_file()
        return _FolderFile(file, FileVersion.of(status, lifetime), lifetime)

    def list(self, name: str) -> dict[str, FileVersion]:
        """The files below a folder that the chain names, by their names in it, sorted; "": all files of the chain.

        Raises `NotFoundError` if it is not a folder of the chain.
        """
        chain = self._index()
        roots = [chain_file.NAME, _PUBLISHED] if chain.is_published else [chain_file.NAME, *sorted(_folders(chain))]
        if name:
            if name not in roots[1:]:
                raise absent_file()
            roots = [name]
        start, files = len(name) + 1 if name else 0, dict[str, FileVersion]()
        for root in roots:
            for file, version in self._versions(root):
                files[file[start:]] = version
                if len(files) > MAX_FILES:
                    raise NotFoundError("the folder has too many files")
        return dict(sorted(files.items()))

    def _versions(self, root: str) -> Iterator[tuple[str, FileVersion]]:
        """The versions of a file, or of all files below a folder, with their names in the chain."""
        chain = self._index()
        growing = _growing(chain)
        for file, status in _walk(self.folder, root, _MAX_DEPTH):
            yield file, FileVersion.of(status, _lifetime_in(file, chain, growing))

    def list_tag(self) -> str:
        """The e_tag of chain.json."""
        self._index()
        assert self._seen is not None
        return self._seen[0]

    def _lifetime(self, name: str) -> Lifetime:
        chain, first = self._index(), name.partition("/")[0]
        served = (
            {chain_file.NAME} if name == chain_file.NAME else {_PUBLISHED} if chain.is_published else _folders(chain)
        )
        if first not in served or not is_plain(name):
            raise absent_file()
        return _lifetime_in(name, chain, _growing(chain))

    def _index(self) -> ChainIndex:
        """The list of the chain. It is read again when the file is another one."""
        path = self.folder / chain_file.NAME
        try:
            tag = FileVersion.of(os.stat(path), Lifetime.REPLACED).e_tag
        except OSError:
            raise NotFoundError("the chain is gone, or there is none", where=self.folder) from None
        seen = self._seen
        if seen is None or seen[0] != tag:
            seen = self._seen = (tag, chain_file.read(self.folder))  # an older tag would only be requested again
        return seen[1]


def _folders(chain: ChainIndex) -> set[str]:
    """The folders that a chain names."""
    folders = {one.folder for one in chain.members} | {one.folder for one in chain.segments}
    folders |= {shared.folder for one in chain.members for shared in one.shared}
    return folders if chain.tip is None else {*folders, chain.tip.folder}


def _growing(chain: ChainIndex) -> set[str]:
    return {one.folder for one in chain.segments if one.step is None}


def _lifetime_in(name: str, chain: ChainIndex, growing: set[str]) -> Lifetime:
    first, _, rest = name.partition("/")
    if chain.is_published and first == _PUBLISHED and rest.partition("/")[0] in _CREATED_ONCE:
        return Lifetime.IMMUTABLE
    return Lifetime.GROWING if first in growing and name.endswith(".ckg") else Lifetime.REPLACED


def is_plain(name: str) -> bool:
    """Whether a name has only parts that files of chains have: none that leads elsewhere, and no draft."""
    parts = name.split("/")
    return len(parts) <= _MAX_DEPTH and all(one not in ("", ".", "..") and not is_draft(one) for one in parts)


def _walk(folder: Path, name: str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """The plain files below a name in a folder, or that file itself. Links are not followed."""
    try:
        status = os.lstat(folder / name)
        if stat.S_ISREG(status.st_mode):
            yield name, status
        elif stat.S_ISDIR(status.st_mode) and depth:
            for one in os.listdir(folder / name):
                if not is_draft(one):
                    yield from _walk(folder, f"{name}/{one}", depth - 1)
    except FileNotFoundError:
        return  # removed meanwhile


def absent_file() -> CkptError:
    """The error of a file that the chain does not have, or that is not served."""
    return NotFoundError("the chain does not have this file")
