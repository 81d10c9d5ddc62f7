"""Reading bytes of files, and knowing that they are the bytes once written.

A `Seal` is a checksum that a file promises for a range of itself. A `Reader`
computes what it can of those checksums from the bytes that pass through it
anyway; what it saw leaves as `Evidence`, plain data that any process may send
home. `verify_seals` puts all evidence together, reads only what nobody has read,
and names the seals that do not hold. So bytes are read once, not twice.
"""

import errno
import os
import resource
import stat
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash
from isal import isal_zlib

from ckpt_codecs.scratch import acquire_buffer, release_buffer
from ckpt_formats.core.errors import Corrupt, NotFound, Unsafe
from ckpt_formats.core.identity import Identities, note

Kind = Literal["crc32", "xxh3-128"]

_Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 1 << 22
_MOST_PIECES = 4096
_MOST_KEPT = 8 << 20
_RESERVED = 32
"""Files that the process may need besides those that it reads: its streams, libraries, what it writes."""
_MOST_READERS = 16
"""That are thought to be open at a time."""


@dataclass(frozen=True, slots=True)
class Seal:
    """A checksum that a file promises for a range of its own bytes."""

    path: Path
    offset: int
    nbytes: int
    kind: Kind
    digest: int
    label: str
    """What the range is called, for messages: `archive/data/3`, `layer.0/exp_avg`."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The checksum of bytes `start` to `stop` of a sealed range, as somebody read them."""

    seal: Seal
    start: int
    stop: int
    digest: int


class Reader:
    """Reads ranges of files, and gathers evidence of what it read. Not for sharing between threads."""

    def __init__(
        self, *, check: bool = True, most_files: int | None = None, identities: Identities | None = None
    ) -> None:
        """`identities` are those of the files when they were first opened: another file in their place is refused."""
        self._check = check
        self._most_files = files_each(_MOST_READERS) if most_files is None else most_files
        self._identities = identities or {}
        self._files: dict[Path, int] = {}
        self._tallies: dict[Seal, _RunningCrc | _RunningHash] = {}
        self._kept: OrderedDict[Hashable, _Array] = OrderedDict()
        self._rooms: dict[Hashable, _Array] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        self._kept.clear()
        while self._rooms:
            release_buffer(self._rooms.popitem()[1])

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Seal | None = None) -> None:
        """Fill `out` (bytes) from `offset` on.

        Raises `Corrupt` if the file ends too early, `NotFound` if it cannot be read.
        """
        done, view = 0, out
        try:
            file = self._open(path)
            while done < len(out):
                got = os.preadv(file, [view], offset + done)
                if got == 0:
                    raise Corrupt(
                        f"the file ends at byte {offset + done}, but a tensor reaches to byte {offset + len(out)}",
                        where=path,
                        hint="It was truncated, or is still being written: copy it again.",
                    )
                done += got
                view = out[done:]
        except OSError as error:
            raise unreadable(error, path) from error
        if seal is not None and self._check:
            self._tally(seal).note(offset - seal.offset, out)

    def kept(self, key: Hashable) -> "_Array | None":
        """What is kept under this name."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: Hashable, make: Callable[[], "_Array"]) -> "_Array":
        """What `make` gives; made anew only if it is not among the last few MiB asked for. Not to be changed."""
        found = self.kept(key)
        return self._keep(key, make()) if found is None else found

    def keep_filled(self, key: Hashable, nbytes: int, fill: Callable[["_Array"], None]) -> "_Array":
        """The same of bytes that `fill` writes, in memory that is used again: valid until this thread takes more."""
        found = self.kept(key)
        if found is not None:
            return found
        room = acquire_buffer(nbytes)
        fill(room[:nbytes])
        self._rooms[key] = room
        return self._keep(key, room[:nbytes])

    def _keep(self, key: Hashable, made: "_Array") -> "_Array":
        self._kept[key] = made
        while len(self._kept) > 1 and sum(self._rooms.get(k, a).nbytes for k, a in self._kept.items()) > _MOST_KEPT:
            dropped, _ = self._kept.popitem(last=False)
            if dropped in self._rooms:
                release_buffer(self._rooms.pop(dropped))
        return made

    def evidence(self) -> tuple[Evidence, ...]:
        """What has been read of every sealed range so far."""
        return tuple(piece for tally in self._tallies.values() for piece in tally.pieces())

    def _open(self, path: Path) -> int:
        if path not in self._files:
            while len(self._files) >= self._most_files:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[path] = open_to_read(path, self._identities)
        return self._files[path]

    def _tally(self, seal: Seal) -> "_RunningCrc | _RunningHash":
        if seal not in self._tallies:
            self._tallies[seal] = _RunningCrc(seal) if seal.kind == "crc32" else _RunningHash(seal)
        return self._tallies[seal]


def verify_seals(evidence: Iterable[Evidence], reader: Reader | None = None) -> Iterator[Seal]:
    """Yield the seals that do not hold, among those that the evidence touches.

    CRC-32s of neighbouring ranges combine into the CRC-32 of both, so only the
    gaps are read here; of other kinds, only evidence of a whole range counts.
    """
    by_seal: dict[Seal, list[Evidence]] = {}
    for piece in evidence:
        by_seal.setdefault(piece.seal, []).append(piece)
    with reader or Reader(check=False) as reader:
        for seal, pieces in by_seal.items():
            if _digest(seal, pieces, reader) != seal.digest:
                yield seal


def seal_is_valid(seal: Seal, reader: Reader) -> bool:
    """Read the whole range and compare."""
    return _digest(seal, [], reader) == seal.digest


def files_each(sharers: int) -> int:
    """Files that each of so many may keep open to read, so that all together stay within the process's limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 64 if limit == resource.RLIM_INFINITY else max(1, min(64, (limit - _RESERVED) // sharers))


def most_workers() -> int:
    """Threads that may work at a time within the process's limit: each reads a file and writes one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if limit == resource.RLIM_INFINITY else max(1, (limit - _RESERVED) // 2)


def open_to_read(path: Path, identities: Identities | None = None) -> int:
    """A descriptor of a regular file, which is recorded (`identity.recording`).

    Raises `NotFound` if it cannot be read, or is none: a pipe would be waited for; `Corrupt` if it is not the file
    that was opened before.
    """
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise unreadable(error, path) from error
    except ValueError as error:
        raise NotFound("no file can have this name: it holds a NUL character") from error
    try:
        result = os.fstat(file)
        if not stat.S_ISREG(result.st_mode):
            raise NotFound("is not a regular file", where=path)
        note(path, result, identities or {})
    except BaseException:
        os.close(file)
        raise
    return file


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Raises as `open_to_read`."""
    return os.fdopen(open_to_read(path), "rb")


def read_whole(path: Path, most: int) -> bytes:
    """All bytes of a file, at most so many. Allocates what the file has, not what it might have."""
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > most:
            raise Unsafe(f"has {nbytes:,} bytes: it would exhaust memory", where=path)
        try:
            return file.read(nbytes)
        except OSError as error:
            raise unreadable(error, path) from error


def write_sealed(folder: Path, file: str, pieces: Iterable[bytes | memoryview]) -> Seal:
    """Write a file front to back; return a seal of all of it, its path relative to the folder."""
    digest, nbytes = xxhash.xxh3_128(), 0
    with (folder / file).open("wb", buffering=0) as out:
        for piece in pieces:
            digest.update(piece)
            nbytes += len(piece)
            write_all(out, piece)
    return Seal(Path(file), 0, nbytes, "xxh3-128", int(digest.intdigest()), file)


def write_all(out: BinaryIO | FileIO, data: bytes | memoryview) -> None:
    """Write every byte: an unbuffered file may take fewer than it is given."""
    view = memoryview(data)
    while view:
        view = view[out.write(view) or 0 :]


def crc32(data: bytes | memoryview, start: int = 0) -> int:
    """CRC-32 as zip and zlib have it."""
    return int(isal_zlib.crc32(data, start))


def crc32_combine(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two neighbouring ranges, the second of them `nbytes` long."""
    return int(isal_zlib.crc32_combine(first, second, nbytes))


_HINTS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Check its permissions."),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Allow more: `ulimit -n 1024`; or give fewer --workers."),
    errno.ESTALE: "It was removed or replaced on the server while it was read.",
}


def unreadable(error: OSError, path: Path) -> Corrupt | NotFound:
    """Say why the system would not let us read this file."""
    if error.errno == errno.EIO:
        return Corrupt("the disk reports an input/output error", where=path, hint="Restore the file from a copy.")
    hint = _HINTS.get(error.errno or 0)
    return NotFound(f"cannot be read: {os.strerror(error.errno or 0)}", where=path, hint=hint)


def _digest(seal: Seal, pieces: list[Evidence], reader: Reader) -> int:
    if seal.kind == "crc32":
        total, at = 0, 0
        for piece in sorted(pieces, key=lambda p: (p.start, -p.stop)):
            if piece.start < at:
                continue  # seen before, or in part: what it adds is read again as a gap
            total = _crc_on(seal, at, piece.start, total, reader)
            total, at = crc32_combine(total, piece.digest, piece.stop - piece.start), piece.stop
        return _crc_on(seal, at, seal.nbytes, total, reader)
    for piece in pieces:
        if (piece.start, piece.stop) == (0, seal.nbytes):
            return piece.digest
    state = xxhash.xxh3_128()
    for block in _blocks(seal, 0, seal.nbytes, reader):
        state.update(block)
    return int(state.intdigest())


def _crc_on(seal: Seal, start: int, stop: int, total: int, reader: Reader) -> int:
    for block in _blocks(seal, start, stop, reader):
        total = crc32(block, total)
    return total


def _blocks(seal: Seal, start: int, stop: int, reader: Reader) -> Iterator[memoryview]:
    buffer = np.empty(min(_BLOCK, max(stop - start, 0)), np.uint8).data
    for at in range(start, stop, _BLOCK):
        view = buffer[: min(_BLOCK, stop - at)]
        reader.read_into(seal.path, seal.offset + at, view)
        yield view


class _RunningCrc:
    """CRC-32s of the ranges read, joined where one begins where the last ended."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._pieces: list[list[int]] = []

    def note(self, start: int, data: memoryview) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last[1] == start:
            last[1], last[2] = start + len(data), crc32(data, last[2])
        elif len(self._pieces) < _MOST_PIECES:
            self._pieces.append([start, start + len(data), crc32(data)])

    def pieces(self) -> Iterator[Evidence]:
        for start, stop, digest in self._pieces:
            yield Evidence(self._seal, start, stop, digest)


class _RunningHash:
    """A running hash, as long as the range is read front to back."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._state = xxhash.xxh3_128()
        self._stop = 0

    def note(self, start: int, data: memoryview) -> None:
        if start == self._stop:
            self._state.update(data)
            self._stop += len(data)

    def pieces(self) -> Iterator[Evidence]:
        yield Evidence(self._seal, 0, self._stop, int(self._state.intdigest()))
