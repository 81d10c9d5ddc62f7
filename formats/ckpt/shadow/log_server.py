"""Send the files of a chain's log over a socket, for shadows that share no file system with the run.

A reader sends requests, in JSON, and says from where:

    {"request": "list"}                                          ANSWER: the bytes of chain.json
    {"request": "folder", "folder": F}                           ANSWER: JSON, the names and sizes of its files
    {"request": "file", "folder": F, "file": N, "range": [a, n]} ANSWER: these bytes of a file, at most 1 MiB
    {"request": "grown", "folder": F, "list": H, "nbytes": [...], "seconds": s}
                                                             ANSWER: JSON, the sizes of the logs of all ranks and the
                                                             hash of chain.json, as soon as one of them is another
    {"request": "log", "folder": F, "rank": r, "range": [a, n]}  LOG: at most n bytes of a rank's log, by `sendfile`

Only folders that chain.json names can be read. Nothing is computed from what is sent, and no file is changed.
"""

import json
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from ckpt.serving.address import NetworkAddress
from ckpt.shadow import wire
from ckpt.shadow.listener import Listener
from ckpt.shadow.wire import FrameKind
from ckpt_formats.core.errors import CorruptError, NotFoundError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.values import is_natural
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain.file import ChainIndex
from ckpt_formats.universal.gradients.segment import rank_file

IDLE_SECONDS = 120.0
"""How long a peer may stay without a request."""
SEND_SECONDS = 60.0
"""The longest time in which a peer takes no byte of an answer."""
MAX_WAIT = 10.0
"""How long an answer to "grown" may wait."""
MAX_LOG = 1 << 26
"""The maximum size of a LOG frame in bytes."""
MAX_LIST = 1 << 28
"""The maximum size of chain.json, and of the list of a folder, in bytes."""
_SHORTEST, _LONGEST = 0.001, 0.05
"""Seconds between two looks at the sizes of files: twice as long each time."""
_MAX_RANKS = 1 << 12
_MAX_FILES = 1 << 20


class LogServer(Listener):
    """Listens for shadows on other machines, each in a thread, until it is closed. The run does not notice it."""

    served = "log"

    def __init__(
        self, chain: Path, address: NetworkAddress, token: bytes | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen at once. Raises as `Listener`, and `NotFoundError` if there is no chain."""
        self.path = chain
        self._seen: tuple[tuple[int, ...], ChainIndex, str] | None = None
        self._chain()
        super().__init__(address, token, tls)

    def _answer(self, peer: socket.socket) -> None:
        while True:
            kind, body = wire.receive(peer, MAX_BODY, IDLE_SECONDS)
            try:
                request = json.loads(body)
            except (ValueError, RecursionError):
                raise _NOT_A_REQUEST from None
            if kind is not FrameKind.REQUEST or not isinstance(request, dict):
                raise _NOT_A_REQUEST
            if request.get("request") == "log":
                self._send_log(peer, request)
            else:
                wire.send(peer, FrameKind.ANSWER, self._content(request), SEND_SECONDS)

    def _content(self, request: dict[str, Any]) -> bytes:
        what = request.get("request")
        if what == "list":
            return read_whole(self.path / index.NAME, MAX_LIST)
        if what == "grown":
            return self._grown(request)
        if what == "folder":
            return json.dumps(list(_files(self._folder(request)))).encode()
        if what == "file":
            begin, nbytes = _range(request, wire.CHUNK_NBYTES)
            with open(self._file(request), "rb", buffering=0) as file:
                return os.pread(file.fileno(), nbytes, begin)
        raise _NOT_A_REQUEST

    def _send_log(self, peer: socket.socket, request: dict[str, Any]) -> None:
        rank: Any = request.get("rank")
        begin, nbytes = _range(request, MAX_LOG)
        if not is_natural(rank) or rank >= _MAX_RANKS:
            raise _NOT_A_REQUEST
        path = self._folder(request) / rank_file(rank)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
                there = max(0, min(nbytes, os.fstat(file.fileno()).st_size - begin))
                wire.send_file(peer, file, begin, there, SEND_SECONDS)
        except FileNotFoundError:
            raise NotFoundError("there is no such log") from None

    def _grown(self, request: dict[str, Any]) -> bytes:
        """The sizes of all logs of a segment, when one is not what the reader says, or after some time."""
        known, listed = request.get("nbytes"), request.get("list")
        seconds: Any = request.get("seconds")
        if not isinstance(known, list) or len(known) > _MAX_RANKS or not all(map(is_natural, known)):
            raise _NOT_A_REQUEST
        if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_WAIT or not isinstance(listed, str):
            raise _NOT_A_REQUEST
        folder, deadline, pause = self._folder(request), time.monotonic() + seconds, _SHORTEST
        while True:
            sizes = [_size(folder / rank_file(rank)) for rank in range(len(known))]
            now = self._chain()[1]
            if sizes != known or now != listed or time.monotonic() > deadline:
                return json.dumps({"nbytes": sizes, "list": now}).encode()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _chain(self) -> tuple[ChainIndex, str]:
        """The list of the chain, and its hash. It is read again when the file is another one."""
        path = self.path / index.NAME
        try:
            status = os.stat(path)
        except OSError:
            raise NotFoundError("the chain is gone, or there is none", where=self.path) from None
        identity = (status.st_ino, status.st_size, status.st_mtime_ns)
        seen = self._seen
        if seen is None or seen[0] != identity:
            content = read_whole(path, MAX_LIST)  # a hash of an older list would only be requested again
            seen = self._seen = (identity, index.read(self.path), list_hash(content))
        return seen[1:]

    def _folder(self, request: dict[str, Any]) -> Path:
        """The requested folder, if the chain has it."""
        name, (chain, _) = request.get("folder"), self._chain()
        named = {one.folder for one in chain.members} | {one.folder for one in chain.segments}
        named |= {shared.folder for one in chain.members for shared in one.shared}
        if not isinstance(name, str) or name not in named:
            raise NotFoundError("the chain does not have this folder")
        return self.path / name

    def _file(self, request: dict[str, Any]) -> Path:
        folder, name = self._folder(request), request.get("file")
        if not isinstance(name, str) or name not in (one for one, _ in _files(folder)):
            raise NotFoundError("there is no such file")
        return folder / name


MAX_BODY = 1 << 16
"""The maximum size of a request in bytes."""
_NOT_A_REQUEST = CorruptError("not a request")


def list_hash(content: bytes | bytearray) -> str:
    """By which the two sides know whether chain.json is another one."""
    return xxhash.xxh3_64_hexdigest(content)


def _size(path: Path) -> int:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _range(request: dict[str, Any], max_nbytes: int) -> tuple[int, int]:
    begin_and_size = request.get("range")
    if not (isinstance(begin_and_size, list) and len(begin_and_size) == 2 and all(map(is_natural, begin_and_size))):
        raise _NOT_A_REQUEST
    begin, nbytes = begin_and_size
    if begin >= 1 << 62 or nbytes > max_nbytes:
        raise _NOT_A_REQUEST
    return begin, nbytes


def _files(folder: Path, prefix: str = "", depth: int = 3) -> Iterator[tuple[str, int]]:
    """The names, with `/` between folders, and the sizes of a folder's files. Links are not followed."""
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _MAX_FILES:
                raise CorruptError("the folder has too many files")
            if entry.is_dir(follow_symlinks=False) and depth:
                yield from _files(folder / entry.name, f"{prefix}{entry.name}/", depth - 1)
            elif entry.is_file(follow_symlinks=False):
                yield f"{prefix}{entry.name}", entry.stat(follow_symlinks=False).st_size
