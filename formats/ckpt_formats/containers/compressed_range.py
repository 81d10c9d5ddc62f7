"""A range of a file that is one compressed stream, of zstd or of deflate, and values in what it decodes to.

A stream can be decoded only from its start: sequential reads decode it once. Memory is limited by the window size of
the stream, whatever it decodes to.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.seals import Seal, crc32
from ckpt_formats.core.tensor import Array, Blob, FileBlob

MAX_WINDOW = 1 << 27
"""Bytes of the window of a frame of zstd that is decoded as a stream: what the highest level takes."""
_EDGE = 1 << 16
_STEP = 1 << 20
_MAX_CURSORS = 8


class Decoder(Protocol):
    """Decodes a stream front to back."""

    def read(self, max_nbytes: int) -> bytes:
        """The next decoded bytes, at most `max_nbytes`; empty at the end.

        Raises `CorruptError` if the stream is damaged, `UnsafeError` if it takes too much memory.
        """


OpenDecoder = Callable[["Source"], Decoder]
"""A decoder of the bytes of a source: a function that processes can send to one another."""


class Frame:
    """The decoded bytes of a compressed range. Offsets count decoded bytes.

    The constructor decodes the range once to get its length and the CRC-32 of what it decodes to, and stores the first
    and last bytes. Raises `CorruptError`, or `UnsafeError` if the range decodes to more than `max_nbytes` bytes.
    """

    base = 0

    def __init__(
        self, path: Path, offset: int, nbytes: int, max_nbytes: int, open_decoder: OpenDecoder, label: str | None = None
    ) -> None:
        """`label`: the name of the range. If it is given, `seal` has a checksum of the compressed bytes."""
        self.path = path
        self.offset, self.nbytes = offset, nbytes
        self.seal: Seal | None = None
        self._open = open_decoder
        self._cursors: list[_Cursor] = []
        self._lock = Lock()
        self._head, self._tail, self.length, self.crc = b"", b"", 0, 0
        with Reader(check=False) as reader:
            cursor = self._first_cursor(reader)
            while data := cursor.read(_STEP):
                self.length += len(data)
                self.crc = crc32(data, self.crc)
                if self.length > max_nbytes:
                    raise UnsafeError(
                        f"the item of {nbytes:,} bytes decodes to more than {max_nbytes:,}: "
                        "it would exhaust memory or disk",
                        where=path,
                    )
                if len(self._head) < _EDGE:
                    self._head += data[: _EDGE - len(self._head)]
                self._tail = (self._tail + data)[-_EDGE:]
        if label is not None:
            self.seal = Seal(path, offset, nbytes, "crc32", cursor.source.crc, label)

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
        if cursor.at < self.length:
            with self._lock:
                self._cursors = [*self._cursors[1 - _MAX_CURSORS :], cursor]
        elif cursor.read(1):
            raise self.corrupt(f"the compressed bytes decode to more than {self.length:,} bytes")

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

    def __getstate__(self) -> dict[str, Any]:
        """Without what only this process has: positions in open streams, and the lock."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_cursors", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cursors, self._lock = [], Lock()

    def _cursor(self, offset: int) -> "_Cursor":
        """Take the nearest cursor before the offset, or a new one. No other thread uses it until it is put back."""
        with self._lock:
            candidates = [cursor for cursor in self._cursors if cursor.at <= offset]
            nearest = max(candidates, key=lambda cursor: cursor.at, default=None)
            if nearest is None:
                return _Cursor(Source(self.path, self.offset, self.nbytes, self.seal), self._open)
            self._cursors.remove(nearest)
            return nearest

    def _first_cursor(self, reader: Reader) -> "_Cursor":
        source = Source(self.path, self.offset, self.nbytes, None, is_summed=True)
        source.reader = reader
        return _Cursor(source, self._open)


@dataclass(frozen=True)
class DecompressedBlob(Blob):
    """Values in a compressed range. `raw` has their offset and strides in the decoded bytes."""

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
        """The complete range: compressed bytes cannot be assigned to values."""
        frame = self.frame
        yield FileBlob.packed(frame.path, frame.offset, (frame.nbytes,), DTYPES["uint8"], frame.seal)


class _Stream(Reader):
    """A reader of the decoded bytes of a frame."""

    def __init__(self, frame: Frame, reader: Reader) -> None:
        super().__init__(check=False)
        self._frame, self._reader = frame, reader

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Seal | None = None) -> None:
        self._frame.read_into(offset, out, self._reader)


class Source:
    """The compressed bytes as a file object for a decoder."""

    def __init__(self, path: Path, offset: int, nbytes: int, seal: Seal | None, is_summed: bool = False) -> None:
        self.path, self._is_summed = path, is_summed
        self._at, self._end, self._seal = offset, offset + nbytes, seal
        self.reader: Reader | None = None
        self.crc = 0
        """The CRC-32 of all bytes that were read, if they are summed."""

    def read(self, max_nbytes: int = -1) -> bytes:
        """The next bytes: at most `max_nbytes`, or all if it is negative; empty at the end."""
        assert self.reader is not None
        left = self._end - self._at
        out = bytearray(left if max_nbytes < 0 else min(max_nbytes, left))
        if out:
            self.reader.read_into(self.path, self._at, memoryview(out), self._seal)
            self._at += len(out)
            if self._is_summed:
                self.crc = crc32(memoryview(out), self.crc)
        return bytes(out)


def zstd_decoder(source: Source, max_window: int = MAX_WINDOW) -> Decoder:
    """A decoder of frames of zstd with windows of limited size. Raises `UnsupportedError` if zstandard is missing."""
    try:
        import zstandard
    except ImportError:
        message, hint = "the item is compressed by zstd", "Install the package `zstandard`."
        raise UnsupportedError(message, where=source.path, hint=hint) from None
    decoder = zstandard.ZstdDecompressor(max_window_size=max_window)
    stream: Any = decoder.stream_reader(source, read_across_frames=True)  # type: ignore[arg-type]
    return _ZstdDecoder(stream, zstandard.ZstdError, source.path)


@dataclass(frozen=True)
class _ZstdDecoder:
    stream: Any
    broken: type[Exception]
    path: Path

    def read(self, max_nbytes: int) -> bytes:
        try:
            data: bytes = self.stream.read(max_nbytes)
        except self.broken as error:
            if "too much memory" in str(error):
                raise UnsafeError("decompressing the item needs too large a window", where=self.path) from None
            raise CorruptError(f"the item cannot be decoded: {error}", where=self.path) from None
        return data


class DeflateDecoder:
    """A decoder of one stream of deflate without header, as zip archives have it, that ends where its source ends."""

    def __init__(self, source: Source) -> None:
        self._source, self._inflater = source, zlib.decompressobj(-zlib.MAX_WBITS)

    def read(self, max_nbytes: int) -> bytes:
        inflater = self._inflater
        while not inflater.eof:
            packed = inflater.unconsumed_tail or self._source.read(_EDGE)
            try:
                data = inflater.decompress(packed, max_nbytes)
            except zlib.error as error:
                raise self._corrupt(f"the item cannot be decoded: {error}") from None
            if data:
                return data
            if not packed and not inflater.eof:
                raise self._corrupt("the item ends too early")
        if inflater.unused_data or self._source.read(1):
            raise self._corrupt("the item goes on after the end of its compressed stream")
        return b""

    def _corrupt(self, message: str) -> CorruptError:
        return CorruptError(message, where=self._source.path)


class _Cursor:
    """A position in the decoded stream, which only moves forward. Raises as its decoder."""

    def __init__(self, source: Source, open_decoder: OpenDecoder) -> None:
        self.source, self.at = source, 0
        self._decoder = open_decoder(source)

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
        return self._decoder.read(max_nbytes)

    def _advance(self, count: int) -> None:
        if not count:
            raise CorruptError("the item ends too early", where=self.source.path)
        self.at += count
