"""Read items that zstd compressed when they were written (`stream.zstd/1`).

Such an item is one compressed stream, which decodes to the archive of an ordinary item. A stream
can be decoded only from its start: sequential reads decode it once. Memory is limited by
the window size of the stream.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import Reader, Seal, crc32
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, Blob, FileBlob

DESCRIPTOR = "stream.zstd/1"
_MAX_WINDOW = 1 << 27
_EDGE = 1 << 16
_STEP = 1 << 20
_MAX_CURSORS = 8


class Frame:
    """The decoded bytes of a compressed item. Offsets count decoded bytes.

    The constructor decodes the item once to get its length, and stores the first and last bytes.
    Raises `CorruptError`, or `UnsafeError` if the item decodes to more than `max_nbytes` bytes.
    """

    base = 0

    def __init__(self, path: Path, offset: int, nbytes: int, max_nbytes: int) -> None:
        self.path = path
        self.offset, self.nbytes = offset, nbytes
        self._cursors: list[_Cursor] = []
        self._lock = Lock()
        self._head, self._tail, self.length = b"", b"", 0
        with Reader(check=False) as reader:
            for data in self._decoded(reader):
                self.length += len(data)
                if self.length > max_nbytes:
                    raise UnsafeError(
                        f"the item of {nbytes:,} bytes decodes to more than {max_nbytes:,}: "
                        "it would exhaust memory or disk",
                        where=path,
                    )
                if len(self._head) < _EDGE:
                    self._head += data[: _EDGE - len(self._head)]
                self._tail = (self._tail + data)[-_EDGE:]

    def __enter__(self) -> "Frame":
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: no file is open."""

    def at(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` decoded bytes from `offset` on. Raises `CorruptError` if the item is shorter."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.length:
            raise self.corrupt(f"bytes {offset} to {offset + nbytes} are needed, but there are {self.length}")
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        if (within := offset - self.length + len(self._tail)) >= 0:
            return self._tail[within : within + nbytes]
        out = bytearray(nbytes)
        with Reader(check=False) as reader:
            self.read_into(offset, memoryview(out), reader)
        return bytes(out)

    def read_into(self, offset: int, out: memoryview, reader: Reader) -> None:
        """Fill `out` with the bytes from `offset` on. Sequential reads decode nothing twice."""
        cursor = self._cursor(offset)
        cursor.source.reader = reader
        cursor.skip_to(offset)
        cursor.fill(out)
        with self._lock:
            self._cursors = [*self._cursors[1 - _MAX_CURSORS :], cursor]

    def check(self, seals: Iterable[Seal]) -> None:
        """Compare the decoded bytes with their checksums. Raises `CorruptError`."""
        with Reader(check=False) as reader:
            for seal in seals:
                total = 0
                for at in range(seal.offset, seal.offset + seal.nbytes, _STEP):
                    data = memoryview(bytearray(min(_STEP, seal.offset + seal.nbytes - at)))
                    self.read_into(at, data, reader)
                    total = crc32(data, total)
                if total != seal.digest:
                    raise self.corrupt(f"{seal.label}: its {seal.nbytes:,} bytes do not fit their crc32 checksum")

    def corrupt(self, message: str) -> CorruptError:
        """The error with this message and the path of the file."""
        return CorruptError(message, where=self.path)

    def __getstate__(self) -> tuple[Path, int, int, bytes, bytes, int]:
        return self.path, self.offset, self.nbytes, self._head, self._tail, self.length

    def __setstate__(self, state: tuple[Path, int, int, bytes, bytes, int]) -> None:
        self.path, self.offset, self.nbytes, self._head, self._tail, self.length = state
        self._cursors, self._lock = [], Lock()

    def _cursor(self, offset: int) -> "_Cursor":
        """Take the nearest cursor before the offset, or a new one. No other thread uses it until it is put back."""
        with self._lock:
            candidates = [cursor for cursor in self._cursors if cursor.at <= offset]
            nearest = max(candidates, key=lambda cursor: cursor.at, default=None)
            if nearest is None:
                return _Cursor(self.path, self.offset, self.nbytes)
            self._cursors.remove(nearest)
            return nearest

    def _decoded(self, reader: Reader) -> Iterator[bytes]:
        cursor = _Cursor(self.path, self.offset, self.nbytes)
        cursor.source.reader = reader
        while data := cursor.read(_STEP):
            yield data


@dataclass(frozen=True)
class DecompressedBlob(Blob):
    """Values in a compressed item. `raw` has their offset and strides in the decoded bytes."""

    frame: Frame
    raw: FileBlob

    @property
    def shape(self) -> Shape:
        return self.raw.shape

    @property
    def dtype(self) -> DType:
        return self.raw.dtype

    def crop(self, box: Box) -> "DecompressedBlob":
        return DecompressedBlob(self.frame, self.raw.crop(box))

    def read_into(self, out: Array, reader: Reader) -> None:
        """Read the values into `out`, an array of this shape and dtype."""
        self.raw.read_into(out, _Stream(self.frame, reader))

    def sources(self) -> Iterator[FileBlob]:
        """The complete item: compressed bytes cannot be assigned to values."""
        yield FileBlob.packed(self.frame.path, self.frame.offset, (self.frame.nbytes,), DTYPES["uint8"])


class _Stream(Reader):
    """A reader of the decoded bytes of a frame."""

    def __init__(self, frame: Frame, reader: Reader) -> None:
        super().__init__(check=False)
        self._frame, self._reader = frame, reader

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Seal | None = None) -> None:
        self._frame.read_into(offset, out, self._reader)


class _Source:
    """The compressed bytes as a file object for zstandard."""

    def __init__(self, path: Path, offset: int, nbytes: int) -> None:
        self._path, self._at, self._end = path, offset, offset + nbytes
        self.reader: Reader | None = None

    def read(self, max_nbytes: int = -1) -> bytes:
        """The next bytes: at most `max_nbytes`, or all if it is negative; empty at the end."""
        assert self.reader is not None
        left = self._end - self._at
        out = bytearray(left if max_nbytes < 0 else min(max_nbytes, left))
        if out:
            self.reader.read_into(self._path, self._at, memoryview(out))
            self._at += len(out)
        return bytes(out)


class _Cursor:
    """A position in the decoded stream, which only moves forward.

    Raises `CorruptError`, `UnsafeError`, or `UnsupportedError` if zstandard is not installed.
    """

    def __init__(self, path: Path, offset: int, nbytes: int) -> None:
        try:
            import zstandard
        except ImportError:
            message, hint = "the item is compressed by zstd", "Install the package `zstandard`."
            raise UnsupportedError(message, where=path, hint=hint) from None
        self._path, self._broken = path, zstandard.ZstdError
        self.source, self.at = _Source(path, offset, nbytes), 0
        decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._stream: Any = decoder.stream_reader(self.source, read_across_frames=True)  # type: ignore[arg-type]

    def skip_to(self, offset: int) -> None:
        """Decode up to an offset."""
        while self.at < offset:
            self._advance(len(self.read(min(_STEP, offset - self.at))))

    def fill(self, out: memoryview) -> None:
        """Fill `out` with the next decoded bytes."""
        done = 0
        while done < len(out):
            data = self.read(min(_STEP, len(out) - done))
            self._advance(len(data))
            out[done : done + len(data)] = data
            done += len(data)

    def read(self, max_nbytes: int) -> bytes:
        """The next decoded bytes, at most `max_nbytes`, without moving `at`."""
        try:
            data: bytes = self._stream.read(max_nbytes)
        except self._broken as error:
            if "too much memory" in str(error):
                raise UnsafeError("decompressing the item needs too large a window", where=self._path) from None
            raise CorruptError(f"the item cannot be decoded: {error}", where=self._path) from None
        return data

    def _advance(self, count: int) -> None:
        if not count:
            raise CorruptError("the item ends too early", where=self._path)
        self.at += count
