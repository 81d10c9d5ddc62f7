"""Items that went through zstd on their way to the file (`stream.zstd/1`).

An item is then one compressed stream of the archive that it would have been. It
can only be decoded from its start, so what is asked for in order is decoded
once, and memory is bounded by the window that the stream was made with.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import Corrupt, Unsafe, Unsupported
from ckpt_formats.core.files import Reader, Seal, crc32
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, FileBlob

DESCRIPTOR = "stream.zstd/1"
_MOST_WINDOW = 1 << 27
_EDGE = 1 << 16
_STEP = 1 << 20
_MOST_CURSORS = 8


class Frame:
    """The bytes of a compressed item, by their offset in what it decodes to.

    Making one decodes all of it once, to know its length, and keeps both its
    edges. Raises `Corrupt`, or `Unsafe` if it decodes to more than `most` bytes.
    """

    base = 0

    def __init__(self, path: Path, offset: int, nbytes: int, most: int) -> None:
        self.path = path
        self.offset, self.nbytes = offset, nbytes
        self._cursors: list[_Cursor] = []
        self._lock = Lock()
        self._head, self._tail, self.length = b"", b"", 0
        with Reader(check=False) as reader:
            for piece in self._decoded(reader):
                self.length += len(piece)
                if self.length > most:
                    raise Unsafe(
                        f"the item of {nbytes:,} bytes decodes to more than {most:,}: it would exhaust memory or disk",
                        where=path,
                    )
                if len(self._head) < _EDGE:
                    self._head += piece[: _EDGE - len(self._head)]
                self._tail = (self._tail + piece)[-_EDGE:]

    def __enter__(self) -> "Frame":
        return self

    def __exit__(self, *error: object) -> None:
        """It holds nothing open."""

    def at(self, offset: int, nbytes: int) -> bytes:
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
        """Fill `out` from `offset` on. Asked for in order, nothing is decoded twice."""
        cursor = self._cursor(offset)
        cursor.source.reader = reader
        cursor.skip_to(offset)
        cursor.fill(out)
        with self._lock:
            self._cursors = [*self._cursors[1 - _MOST_CURSORS :], cursor]

    def check(self, seals: tuple[Seal, ...]) -> None:
        """Hold the decoded bytes against their checksums. Raises `Corrupt`."""
        with Reader(check=False) as reader:
            for seal in seals:
                total = 0
                for at in range(seal.offset, seal.offset + seal.nbytes, _STEP):
                    piece = memoryview(bytearray(min(_STEP, seal.offset + seal.nbytes - at)))
                    self.read_into(at, piece, reader)
                    total = crc32(piece, total)
                if total != seal.digest:
                    raise self.corrupt(f"{seal.label}: its {seal.nbytes:,} bytes do not fit their crc32 checksum")

    def corrupt(self, what: str) -> Corrupt:
        return Corrupt(what, where=self.path)

    def __getstate__(self) -> tuple[Path, int, int, bytes, bytes, int]:
        return self.path, self.offset, self.nbytes, self._head, self._tail, self.length

    def __setstate__(self, state: tuple[Path, int, int, bytes, bytes, int]) -> None:
        self.path, self.offset, self.nbytes, self._head, self._tail, self.length = state
        self._cursors, self._lock = [], Lock()

    def _cursor(self, offset: int) -> "_Cursor":
        """The one that has come nearest to the offset, or a new one. Nobody else has it meanwhile."""
        with self._lock:
            before = [cursor for cursor in self._cursors if cursor.at <= offset]
            nearest = max(before, key=lambda cursor: cursor.at, default=None)
            if nearest is None:
                return _Cursor(self.path, self.offset, self.nbytes)
            self._cursors.remove(nearest)
            return nearest

    def _decoded(self, reader: Reader) -> Iterator[bytes]:
        cursor = _Cursor(self.path, self.offset, self.nbytes)
        cursor.source.reader = reader
        while piece := cursor.read(_STEP):
            yield piece


@dataclass(frozen=True)
class DecompressedBlob:
    """Values in an item that is compressed. `raw` says where they lie in what it decodes to."""

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
        self.raw.read_into(out, _Stream(self.frame, reader))

    def sources(self) -> Iterator[FileBlob]:
        """All of the item: there is no telling which of its bytes are which values."""
        yield FileBlob.packed(self.frame.path, self.frame.offset, (self.frame.nbytes,), DTYPES["uint8"])

    def problems(self) -> Iterator[str]:
        return iter(())


class _Stream(Reader):
    """Reads what a frame decodes to."""

    def __init__(self, frame: Frame, reader: Reader) -> None:
        super().__init__(check=False)
        self._frame, self._reader = frame, reader

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Seal | None = None) -> None:
        self._frame.read_into(offset, out, self._reader)


class _Source:
    """The compressed bytes, as a file that zstandard reads."""

    def __init__(self, path: Path, offset: int, nbytes: int) -> None:
        self._path, self._at, self._end = path, offset, offset + nbytes
        self.reader: Reader | None = None

    def read(self, most: int = -1) -> bytes:
        assert self.reader is not None
        left = self._end - self._at
        out = bytearray(left if most < 0 else min(most, left))
        if out:
            self.reader.read_into(self._path, self._at, memoryview(out))
            self._at += len(out)
        return bytes(out)


class _Cursor:
    """A place in the decoded stream, which only moves on.

    Raises `Corrupt`, `Unsafe`, or `Unsupported` where zstandard is not installed.
    """

    def __init__(self, path: Path, offset: int, nbytes: int) -> None:
        try:
            import zstandard
        except ImportError:
            what, hint = "the item is compressed by zstd", "Install the package `zstandard`."
            raise Unsupported(what, where=path, hint=hint) from None
        self._path, self._broken = path, zstandard.ZstdError
        self.source, self.at = _Source(path, offset, nbytes), 0
        decoder = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        self._stream: Any = decoder.stream_reader(self.source, read_across_frames=True)  # type: ignore[arg-type]

    def skip_to(self, offset: int) -> None:
        while self.at < offset:
            self._advance(len(self.read(min(_STEP, offset - self.at))))

    def fill(self, out: memoryview) -> None:
        done = 0
        while done < len(out):
            piece = self.read(min(_STEP, len(out) - done))
            self._advance(len(piece))
            out[done : done + len(piece)] = piece
            done += len(piece)

    def read(self, most: int) -> bytes:
        try:
            piece: bytes = self._stream.read(most)
        except self._broken as error:
            if "too much memory" in str(error):
                raise Unsafe("the item's compression needs too large a window", where=self._path) from None
            raise Corrupt(f"the item cannot be decoded: {error}", where=self._path) from None
        return piece

    def _advance(self, got: int) -> None:
        if not got:
            raise Corrupt("the item ends too early", where=self._path)
        self.at += got
