"""Read ranges of files, and compute the checksums that the files promise from the same reads.

A `Reader` computes the checksums of sealed ranges (`seals`), as far as possible, from the bytes that it reads for its
caller. The results are `Evidence`: plain data, which another process may send back. `SealChecks` puts the evidence of
all readers together.
"""

import errno
import os
import resource
import stat
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import xxhash

from ckpt_codecs.scratch import MIN_NBYTES, acquire_buffer, release_buffer
from ckpt_formats.core.bands import BAND, Band, BytesInMemory, Rows, rows_nbytes
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError, UnsafeError
from ckpt_formats.core.identity import Identities, note
from ckpt_formats.core.open_file import LocalFile, OpenFile, as_stream, open_file, stream_nbytes
from ckpt_formats.core.publish import EarlyFlush
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.store_path import ObjectFile, StoreError, is_remote
from ckpt_formats.core.zero_runs import ZeroRuns

if TYPE_CHECKING:
    from ckpt_formats.core.checksums import RunningChecksum
    from ckpt_formats.core.evidence import Evidence
    from ckpt_formats.core.prefetch import PlannedReads
    from ckpt_formats.core.value_changes import ValueChanges

Observer = Callable[[Path, int, memoryview], None]
"""Is given bytes of a file: its path, where they begin in it, and (nbytes,) uint8."""

_Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 1 << 22
_MAX_CACHED_BYTES = 8 << 20
_RESERVED = 32
"""Files that the process may need besides those that it reads: standard streams, libraries, output files."""
_EXPECTED_READERS = 16
"""How many readers are open at the same time, if the caller does not state it."""


class Reader:
    """Reads ranges of files, and collects evidence of what it read. Threads must not share one."""

    def __init__(
        self,
        *,
        check: bool = True,
        max_files: int | None = None,
        identities: Identities | None = None,
        band: Band | None = None,
        planned: "PlannedReads | None" = None,
        cache_nbytes: int | None = None,
    ) -> None:
        """A reader that has at most `max_files` files open.

        `check`: compute the checksums of sealed ranges. `identities`: those of the files when they were first opened;
        if another file is at its path later, reading raises `CorruptError`. `band`: one that it shares with other
        readers.
        `planned`: what it will read of objects in stores, so that it is requested before. `cache_nbytes`: the most
        bytes of its cache, if a format asks for more than 8 MiB; None: what the format asks for.
        """
        self._planned = planned
        self._band = band
        self._seals_of_band: set[Seal] = set()
        self._in_memory = BytesInMemory()
        self._check = check
        self._most_cached, self._max_cached_nbytes, self._cached_nbytes = cache_nbytes, _MAX_CACHED_BYTES, 0
        self._observer: Observer | None = None
        self.max_files = files_each(_EXPECTED_READERS) if max_files is None else max_files
        """How many files it has open at most."""
        self._identities = identities or {}
        self._files: dict[Path, OpenFile] = {}
        self._checksums: dict[Seal, RunningChecksum] = {}
        self._cache: OrderedDict[Hashable, _Array] = OrderedDict()
        self._buffers: dict[Hashable, _Array] = {}
        self.zeros = ZeroRuns()
        """Where there was nothing but zeros in what it read itself, not by its band."""
        self.chunks = 0
        """Chunks of encoded values that were compared with their checksums: one that is read twice counts twice."""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()
        self._in_memory = BytesInMemory()
        self._cache.clear()
        self._cached_nbytes = 0
        while self._buffers:
            release_buffer(self._buffers.popitem()[1])

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Seal | None = None) -> None:
        """Fill `out` with the bytes of a file from `offset` on, which are in the range of `seal`, if one is given.

        `out`: (nbytes,) uint8. Raises `CorruptError` if the file ends too early, `NotFoundError` if it cannot be read.
        """
        done, view = 0, out
        try:
            file = self._open(path)
            while done < len(out):
                got = self._read_planned(path, offset + done, view)
                if got is None:
                    got = file.read_into(offset + done, view)
                if got == 0:
                    raise CorruptError(
                        f"the file ends at byte {offset + done}, but a tensor reaches to byte {offset + len(out)}",
                        where=path,
                        hint="It was truncated, or is still being written: copy it again.",
                    )
                done += got
                view = out[done:]
        except OSError as error:
            raise unreadable(error, path) from error
        self.zeros.note(path, offset, out)
        if self._observer is not None:
            self._observer(path, offset, out)
        if seal is not None:
            self.note_sealed(seal, offset - seal.offset, out)

    def note_sealed(self, seal: Seal, start: int, data: memoryview) -> None:
        """Add bytes of a sealed range, from its byte `start` on, to its checksum: the caller has read them otherwise.

        `data`: (nbytes,) uint8.
        """
        if self._check:
            self._checksum(seal).note(start, data)

    @cached_property
    def changes(self) -> "ValueChanges":
        """What was changed other than by rounding in values that were computed of what it read."""
        from ckpt_formats.core.value_changes import ValueChanges  # an index is made without values

        return ValueChanges()

    def _read_planned(self, path: Path, offset: int, view: memoryview) -> int | None:
        if self._planned is None or not is_remote(path):
            return None
        return self._planned.read_into(path, offset, view)

    @contextmanager
    def without_checksums(self) -> Iterator[None]:
        """Within, no checksum of a sealed range is computed: for values that are compared with others of their own."""
        check, self._check = self._check, False
        try:
            yield
        finally:
            self._check = check

    @contextmanager
    def observed(self, observer: Observer | None) -> Iterator[None]:
        """Within, `observer` is called with what is read from files."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    @contextmanager
    def ahead(self, planned: "PlannedReads | None") -> Iterator[None]:
        """Within, these ranges of objects in stores are requested before they are read."""
        before, self._planned = self._planned, planned
        try:
            yield
        finally:
            self._planned = before

    @property
    def sharers(self) -> int:
        """How many readers read the same rows at the same time, this one included."""
        return 1 if self._band is None else self._band.sharers

    def rows(self, rows: Rows) -> "_Array":
        """The bytes from `rows.offset` on, (nbytes,) uint8: of at least one run (see `Rows.within`).

        They are valid until the next call. Raises as `read_into`.
        """
        if self._band is None:
            if not self._in_memory.has(rows):
                self._in_memory.move(rows, rows_nbytes(rows, BAND), self)
            return self._in_memory.at(rows.offset)
        if rows.seal is not None and self._check:
            self._seals_of_band.add(rows.seal)
        return self._band.rows(rows)

    def opened(self, path: Path) -> OpenFile:
        """A file that is open until `max_files` others have been asked for. Raises as `read_into`."""
        if path in self._files:
            self._files[path] = self._files.pop(path)  # the last to be closed
        return self._open(path)

    def file_nbytes(self, path: Path) -> int:
        """The length of a file. Raises as `read_into`."""
        return self._open(path).status.st_size

    def cached(self, key: Hashable) -> "_Array | None":
        """The array in the cache under this key; None if there is none. The caller must not change it."""
        if key in self._cache:
            self._cache.move_to_end(key)
        return self._cache.get(key)

    def cached_or(self, key: Hashable, compute: Callable[[], "_Array"]) -> "_Array":
        """The array in the cache under this key, else the result of `compute`, which then is in the cache.

        The cache has the arrays that were used last, up to 8 MiB. The caller must not change the array.
        """
        array = self.cached(key)
        return self._add_to_cache(key, compute()) if array is None else array

    def cached_or_filled(self, key: Hashable, nbytes: int, fill: Callable[["_Array"], None], most: int = 0) -> "_Array":
        """The same for a buffer, (nbytes,) uint8, that `fill` writes. `most`: how many bytes the cache may have from
        now on, if that is more than before (see `cache_room`).

        It is valid until the next call of this method or of `cached_or`, since the memory is used again.
        """
        array = self.cached(key)
        if array is not None:
            return array
        self._max_cached_nbytes = max(self._max_cached_nbytes, self.cache_room(most))
        # A larger buffer would count as that much of the cache, and leave no room for others.
        buffer = acquire_buffer(nbytes, max(2 * nbytes, MIN_NBYTES))
        fill(buffer[:nbytes])
        self._buffers[key] = buffer
        return self._add_to_cache(key, buffer[:nbytes])

    def cache_room(self, most: int) -> int:
        """How many bytes the cache may have for a format that asks for `most`."""
        return max(_MAX_CACHED_BYTES, most if self._most_cached is None else min(most, self._most_cached))

    def _add_to_cache(self, key: Hashable, array: "_Array") -> "_Array":
        self._cache[key] = array
        self._cached_nbytes += self._buffers.get(key, array).nbytes
        while len(self._cache) > 1 and self._cached_nbytes > self._max_cached_nbytes:
            oldest, removed = self._cache.popitem(last=False)
            self._cached_nbytes -= self._buffers.get(oldest, removed).nbytes
            if oldest in self._buffers:
                release_buffer(self._buffers.pop(oldest))
        return array

    def evidence(self, of: Container[Seal] | None = None) -> "Evidence":
        """The evidence of everything that was read so far of sealed ranges: of all, or of these only."""
        from ckpt_formats.core.evidence import evidence_of, joined  # an index is made without values

        read = ((seal, one.pieces()) for seal, one in self._checksums.items() if of is None or seal in of)
        own = evidence_of(read)
        return own if self._band is None else joined((own, self._band.evidence(self._seals_of_band)))

    def _open(self, path: Path) -> OpenFile:
        if path not in self._files:
            while len(self._files) >= self.max_files:
                self._files.pop(next(iter(self._files))).close()
            self._files[path] = open_to_read(path, self._identities)
        return self._files[path]

    def _checksum(self, seal: Seal) -> "RunningChecksum":
        if seal not in self._checksums:
            from ckpt_formats.core.checksums import checksum_of

            self._checksums[seal] = checksum_of(seal).running()
        return self._checksums[seal]


def files_each(sharers: int) -> int:
    """How many files each of `sharers` readers may have open, so that all stay within the limit of the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 64 if limit == resource.RLIM_INFINITY else max(1, min(64, (limit - _RESERVED) // sharers))


def max_workers() -> int:
    """How many threads may work at once within the limit of open files: each reads one file and writes one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if limit == resource.RLIM_INFINITY else max(1, (limit - _RESERVED) // 2)


def open_to_read(path: Path, identities: Identities | None = None) -> LocalFile | ObjectFile:
    """Open a regular file to read, and record its identity (see `identity.recording`).

    Raises `NotFoundError` if it cannot be read or is no regular file (a pipe would block), `CorruptError` if it is not
    the file that was opened before.
    """
    try:
        file = open_file(path)
    except OSError as error:
        raise unreadable(error, path) from error
    except ValueError as error:
        raise NotFoundError("no file can have this name: it holds a NUL character") from error
    try:
        result = file.status
        if not stat.S_ISREG(result.st_mode):
            raise NotFoundError("is not a regular file", where=path)
        note(path, result, identities or {})
    except BaseException:
        file.close()
        raise
    return file


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Raises as `open_to_read`."""
    return as_stream(open_to_read(path))


def read_range(path: Path, offset: int, nbytes: int) -> bytes:
    """A range of a file. Raises `CorruptError` if the file ends before, and as `open_to_read`."""
    with open_regular(path) as file:
        if stream_nbytes(file) < offset + nbytes:
            raise CorruptError(f"the file ends before byte {offset + nbytes:,}", where=path, hint="It was truncated.")
        try:
            file.seek(offset)
            return file.read(nbytes)
        except OSError as error:
            raise unreadable(error, path) from error


def read_whole(path: Path, max_nbytes: int) -> bytes:
    """All bytes of a file. Raises `UnsafeError` if there are more than `max_nbytes`, and as `open_to_read`."""
    with open_regular(path) as file:
        nbytes = stream_nbytes(file)
        if nbytes > max_nbytes:
            raise UnsafeError(f"has {nbytes:,} bytes: it would exhaust memory", where=path)
        try:
            return file.read(nbytes)
        except OSError as error:
            raise unreadable(error, path) from error


def read_settings(path: Path, max_nbytes: int) -> bytes:
    """All bytes of a file that the user names, which may also be a pipe or a device: it is read up to its bound.

    Raises `UnsafeError` if there are more than `max_nbytes`, and as `open_to_read`.
    """
    if is_remote(path):
        return read_whole(path, max_nbytes)
    try:
        with path.open("rb") as file:
            content = file.read(max_nbytes + 1)
    except OSError as error:
        raise unreadable(error, path) from error
    except ValueError as error:
        raise NotFoundError("no file can have this name: it holds a NUL character") from error
    if len(content) > max_nbytes:
        raise UnsafeError(f"has more than {max_nbytes:,} bytes", where=path)
    return content


def write_sealed(folder: Path, file: str, parts: Iterable[bytes | memoryview], is_flushed: bool = False) -> Seal:
    """Write a file front to back. Returns a seal of the whole file, with a path relative to `folder`.

    `is_flushed`: whether it is flushed afterwards, so that the disk may begin with it. Raises `OSError`.
    """
    digest, nbytes = xxhash.xxh3_128(), 0
    with (folder / file).open("wb", buffering=0) as out:
        early = EarlyFlush(folder / file, out.fileno()) if is_flushed else None
        for part in parts:
            digest.update(part)
            nbytes += len(part)
            write_all(out, part)
            if early is not None:
                early.note(nbytes)
    return Seal(Path(file), 0, nbytes, "xxh3-128", int(digest.intdigest()), file)


def write_all(out: BinaryIO | FileIO, data: bytes | memoryview) -> None:
    """Write all bytes: one call of `write` of an unbuffered file may write fewer."""
    view = memoryview(data)
    while view:
        view = view[out.write(view) or 0 :]


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all bytes to an open file from byte `offset` on: one call of `pwrite` may write fewer."""
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


_HINTS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Check its permissions."),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Allow more: `ulimit -n 1024`; or give fewer --workers."),
    errno.ESTALE: "It was removed or replaced on the server while it was read.",
}


def unreadable(error: OSError, path: Path) -> CkptError:
    """The error for a file that the system did not let us read, with the reason; a `CkptError` stays what it is."""
    if isinstance(error, CkptError):
        return error
    if is_remote(path):
        hint = error.hint if isinstance(error, StoreError) else None
        return NotFoundError(f"cannot be read: {error.strerror}", where=path, hint=hint)
    if error.errno == errno.EIO:
        return CorruptError("the disk reports an input/output error", where=path, hint="Restore the file from a copy.")
    number = error.errno or 0
    return NotFoundError(f"cannot be read: {os.strerror(number)}", where=path, hint=_HINTS.get(number))
