"""Read values from chunks of zarr: plain, compressed, or in shards. Nothing is read until values are asked for.

A chunk decodes to exactly the bytes that its shape states; one that decodes to more is refused before they are made.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np

from ckpt_formats.containers.compressed_range import (
    MAX_WINDOW,
    DecompressedBlob,
    Frame,
    OpenDecoder,
    Source,
    zstd_decoder,
)
from ckpt_formats.containers.crc32c import crc32c
from ckpt_formats.containers.ocdbt import ValueRange
from ckpt_formats.containers.zarr import ArrayLayout, ChunkEncoding
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsafeError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, ArrayBlob, Blob, FileBlob
from ckpt_formats.core.text import printable

_SMALL = 1 << 23
"""Bytes of a decoded chunk up to which it is decoded at once, and kept by the reader."""
_CACHED = 1 << 25
"""Bytes of decoded chunks that a reader keeps, if its share of the memory has room. A block of rows is read of all
chunks beside each other: if they have more, each is decoded as a stream, which goes on at the next block, rather than
anew for each block."""
_MAX_INLINE = 1 << 28
"""Bytes to which a chunk in the database itself may decode, if it is compressed. Writers store up to a few kB there."""
_MAX_FRAMES = 64
_SMALL_WINDOW = 1 << 23
"""Bytes of the window that a frame may have, however short its chunk is: what the highest usual level takes."""
_LEAST_WINDOW = 1 << 21
"""Bytes of a window that are counted for each stream, even if its first frame states a smaller one."""
_MAX_WINDOWS = 1 << 28
"""Bytes of the windows of all streams that are kept open."""
_MAX_FRAME_HEADER = 18
_MAX_SHARD_INDEX = 1 << 26
"""Bytes of the index of a shard, and of all indices that are kept."""
_NOT_STORED = (1 << 64) - 1


class ChunkFrame(Frame):
    """The decoded bytes of a chunk of a known length. It is decoded when it is read, and never only to be measured."""

    def __init__(self, path: Path, place: ValueRange, length: int, compression: str, reader: Reader) -> None:
        offset, nbytes = place.offset, place.nbytes
        self.path, self.offset, self.nbytes, self.length = path, offset, nbytes, length
        self.window = 1 << zlib.MAX_WBITS
        """The most bytes that one stream keeps of what it has decoded."""
        self._open: OpenDecoder = _GzipDecoder
        if compression == "zstd":
            # Further frames of the chunk may take no more than is counted for the first.
            self.window = max(_window(path, place, reader), _LEAST_WINDOW)
            self._open = partial(zstd_decoder, max_window=self.window)
        self.seal = None
        self._cursors, self._lock = [], Lock()
        self._head, self._tail, self.crc = b"", b"", 0

    @property
    def open_nbytes(self) -> int:
        """The bytes of the windows of all streams that are kept open; at least that of one."""
        return self.window * max(1, len(self._cursors))

    def keep_one(self) -> None:
        """Keep one stream only: the one that was read last."""
        with self._lock:
            self._cursors = self._cursors[-1:]


class _GzipDecoder:
    """A decoder of members of gzip."""

    def __init__(self, source: Source) -> None:
        self._source, self._inflater = source, zlib.decompressobj(zlib.MAX_WBITS | 16)

    def read(self, max_nbytes: int) -> bytes:
        while not self._inflater.eof:
            packed = self._inflater.unconsumed_tail or self._source.read(1 << 16)
            try:
                data = self._inflater.decompress(packed, max_nbytes)
            except zlib.error as error:
                raise CorruptError(f"the chunk cannot be decoded: {error}", where=self._source.path) from None
            if data:
                return data
            if not packed and not self._inflater.eof:
                raise CorruptError("the chunk ends too early", where=self._source.path)
        return b""


@dataclass(eq=False)
class ChunkReader:
    """Opens the chunks of one folder, and keeps the last ones open."""

    folder: Path
    _paths: dict[str, Path] = field(default_factory=dict, repr=False)
    """The path of each file: a path is hashed often, and keeps its hash."""
    _frames: dict[ValueRange, ChunkFrame] = field(default_factory=dict, repr=False)
    _indices: dict[ValueRange, Array] = field(default_factory=dict, repr=False)

    def path(self, file: str) -> Path:
        """The path of a file."""
        if file not in self._paths:
            self._paths[file] = self.folder / file
        return self._paths[file]

    def frame(self, place: ValueRange, length: int, compression: str, reader: Reader) -> ChunkFrame:
        """The decoded bytes of a compressed range, whose header is read by `reader`."""
        frame = self._frames.get(place)
        if frame is None:
            frame = ChunkFrame(self.path(place.file), place, length, compression, reader)
            if len(self._frames) >= _MAX_FRAMES or self._least_nbytes() + frame.window > _MAX_WINDOWS:
                self._frames.clear()
            self._frames[place] = frame
        opened = list(self._frames.values())
        if sum(one.open_nbytes for one in opened) > _MAX_WINDOWS:
            for one in opened:
                one.keep_one()
        return frame

    def _least_nbytes(self) -> int:
        """The bytes of the windows if each frame keeps one stream."""
        return sum(one.window for one in list(self._frames.values()))

    def index(self, place: ValueRange, layout: ArrayLayout, data: bytes | None) -> Array:
        """The offset and length of each chunk in a shard, (chunks, 2) uint64; `data` has its bytes if they are in no
        file.

        Raises `CorruptError` if the index does not fit its checksum, or names bytes outside the shard.
        """
        known = self._indices.get(place)
        if known is not None:
            return known
        sharding = layout.sharding
        assert sharding is not None
        count = prod(c // i for c, i in zip(layout.chunks, sharding.shape, strict=True))
        nbytes = 16 * count + 4 * sharding.index_checksum
        path = self.path(place.file)
        if nbytes > min(place.nbytes, _MAX_SHARD_INDEX):
            raise CorruptError(f"a shard of {place.nbytes:,} bytes has no room for its index", where=path)
        at = place.nbytes - nbytes if sharding.index_at_end else 0
        if data is None:
            with Reader(check=False) as reader:
                raw = bytearray(nbytes)
                reader.read_into(path, place.offset + at, memoryview(raw))
        else:
            raw = bytearray(data[at : at + nbytes])
        if sharding.index_checksum and crc32c(bytes(raw[:-4])) != int.from_bytes(raw[-4:], "little"):
            raise CorruptError("the index of a shard does not fit its crc32c checksum", where=path)
        pairs: Array = np.frombuffer(bytes(raw[: 16 * count]), "<u8").reshape(-1, 2)
        offsets, lengths = pairs[:, 0], pairs[:, 1]
        is_inside = (offsets <= place.nbytes) & (lengths <= np.uint64(place.nbytes) - offsets)
        if not (is_inside | (pairs == _NOT_STORED).all(axis=1)).all():
            raise CorruptError("the index of a shard names bytes outside it", where=path)
        known_nbytes = sum(one.nbytes for one in list(self._indices.values()))
        if len(self._indices) >= _MAX_FRAMES or known_nbytes + pairs.nbytes > _MAX_SHARD_INDEX:
            self._indices.clear()
        self._indices[place] = pairs
        return pairs  # another thread may have cleared the dict

    def __getstate__(self) -> Path:
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        self.folder, self._paths, self._frames, self._indices = folder, {}, {}, {}


# Not frozen: there is one for each chunk.
@dataclass(slots=True, eq=False)
class ChunkBlob(Blob):
    """The values of one chunk, or of a block of it."""

    layout: ArrayLayout
    value: ValueRange | bytes
    """Where the encoded chunk is, or its bytes."""
    reader: ChunkReader
    label: str
    """The chunk's key, for messages."""
    fills: bool
    """Whether chunks of a shard that are not stored have the fill value; else they are missing."""
    part: Box

    @property
    def shape(self) -> Shape:
        return self.part.shape

    @property
    def dtype(self) -> DType:
        return self.layout.dtype

    def crop(self, box: Box) -> "ChunkBlob":
        part = box.shift(self.part.start)
        return ChunkBlob(self.layout, self.value, self.reader, self.label, self.fills, part)

    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`, an array of this shape and dtype.

        Raises `CorruptError` for a chunk that does not decode to its shape, `IncompleteError` for one that a shard
        lacks.
        """
        layout = self.layout
        if layout.sharding is None:
            self._read_chunk(self.value, layout.chunks, self.part, out, reader)
            return
        inner = layout.sharding.shape
        data = self.value if isinstance(self.value, bytes) else None
        place = ValueRange(self.label, 0, len(data)) if data is not None else self.value
        assert isinstance(place, ValueRange)
        index = self.reader.index(place, layout, data)
        grid = tuple(c // i for c, i in zip(layout.chunks, inner, strict=True))
        low = tuple(a // i for a, i in zip(self.part.start, inner, strict=True))
        high = tuple(-(-b // i) for b, i in zip(self.part.stop, inner, strict=True))
        for step in np.ndindex(*(b - a for a, b in zip(low, high, strict=True))):
            at = tuple(a + s for a, s in zip(low, step, strict=True))
            corner = tuple(a * i for a, i in zip(at, inner, strict=True))
            chunk = Box(corner, tuple(c + i for c, i in zip(corner, inner, strict=True)))
            common = chunk & self.part if inner else chunk
            assert common is not None
            target = out[common.within(self.part).index]
            offset, nbytes = map(int, index[int(np.ravel_multi_index(at, grid)) if grid else 0])
            if (offset, nbytes) == (_NOT_STORED, _NOT_STORED):
                if not self.fills:
                    raise IncompleteError(f"the shard {printable(self.label)} lacks a chunk", where=self.reader.folder)
                target[...] = np.frombuffer(layout.fill, self.dtype)[0]
                continue
            value = (
                data[offset : offset + nbytes]
                if data is not None
                else ValueRange(place.file, place.offset + offset, nbytes)
            )
            self._read_chunk(value, inner, common.within(chunk), target, reader)

    def sources(self) -> Iterator[FileBlob]:
        """The whole encoded chunk: compressed bytes cannot be assigned to values."""
        if isinstance(self.value, ValueRange):
            path = self.reader.path(self.value.file)
            yield FileBlob.packed(path, self.value.offset, (self.value.nbytes,), DTYPES["uint8"])

    def _read_chunk(self, value: ValueRange | bytes, shape: Shape, part: Box, out: Array, reader: Reader) -> None:
        """Fill `out` with a block of the chunk of this shape that is encoded in `value`."""
        codec, length = self.layout.codec, prod(shape) * self.dtype.itemsize
        trailer = 4 * codec.checksum
        if isinstance(value, bytes):
            if codec.compression is not None and length > _MAX_INLINE:
                text = f"chunk {printable(self.label)} of {length:,} bytes is in the database, in {len(value):,} bytes"
                raise UnsafeError(text, where=self.reader.folder)
            data = _decoded(value, codec, length, self.label, self.reader.folder)
            ArrayBlob(np.frombuffer(data, self.dtype).reshape(shape)).crop(part).read_into(out, reader)
            return
        path = self.reader.path(value.file)
        if value.nbytes < trailer:
            text = f"chunk {printable(self.label)} has {value.nbytes} bytes, fewer than its checksum"
            raise CorruptError(text, where=path)
        stored = FileBlob.packed(path, value.offset, shape, self.dtype)
        is_whole = length <= _SMALL and (part.shape == shape or not self._is_streamed(shape, length, reader))
        if codec.compression is None and not (codec.checksum and is_whole):
            if value.nbytes != length + trailer:
                text = f"chunk {printable(self.label)} has {value.nbytes:,} bytes, but its shape needs {length:,}"
                raise CorruptError(text, where=path)
            stored.crop(part).read_into(out, reader)
        elif is_whole:

            def fill(buffer: Array) -> None:
                encoded = bytearray(value.nbytes)
                reader.read_into(path, value.offset, memoryview(encoded))
                data = _decoded(bytes(encoded), codec, length, self.label, path)
                buffer[:] = np.frombuffer(data, np.uint8)

            if value.nbytes > length + length // 8 + 4096:
                raise CorruptError(f"chunk {printable(self.label)} is larger than what it decodes to", where=path)
            buffer = reader.cached_or_filled((path, value), length, fill, _CACHED)
            out[...] = buffer[:length].view(self.dtype).reshape(shape)[part.index]
        else:
            assert codec.compression is not None
            frame = self.reader.frame(
                ValueRange(value.file, value.offset, value.nbytes - trailer), length, codec.compression, reader
            )
            DecompressedBlob(frame, FileBlob.packed(path, 0, shape, self.dtype)).crop(part).read_into(out, reader)

    def _is_streamed(self, shape: Shape, length: int, reader: Reader) -> bool:
        """Whether the chunks of this shape beside each other are too many for the cache, but not to be open."""
        chunk_count = prod(-(-n // c) for n, c in zip(self.layout.shape[1:], shape[1:], strict=True))
        return chunk_count * length > reader.cache_room(_CACHED) and chunk_count <= _MAX_FRAMES


def _decoded(data: bytes, codec: ChunkEncoding, length: int, label: str, where: Path) -> bytes:
    """The `length` decoded bytes of a chunk. Raises `CorruptError` if there are others, before more are made."""
    if codec.checksum:
        if len(data) < 4 or crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise CorruptError(f"chunk {printable(label)} does not fit its crc32c checksum", where=where)
        data = data[:-4]
    if codec.compression is not None:
        data = _inflated(data, codec.compression, length, label, where)
    if len(data) != length:
        text = f"chunk {printable(label)} decodes to {len(data):,} bytes or more, but its shape needs {length:,}"
        raise CorruptError(text, where=where)
    return data


def _window(path: Path, place: ValueRange, reader: Reader) -> int:
    """The bytes of the window of a frame of zstd. Raises `CorruptError`, and `UnsafeError` for too many."""
    import zstandard

    header = bytearray(min(_MAX_FRAME_HEADER, place.nbytes))
    reader.read_into(path, place.offset, memoryview(header))
    try:
        window = zstandard.get_frame_parameters(bytes(header)).window_size
    except zstandard.ZstdError as error:
        raise CorruptError(f"a chunk cannot be decoded: {error}", where=path) from None
    if window > MAX_WINDOW:
        raise _too_large_a_window(window, path)
    return window


def _too_large_a_window(nbytes: int, where: Path) -> UnsafeError:
    return UnsafeError(f"decompressing a chunk needs too large a window: {nbytes:,} bytes", where=where)


def _decoded_frame(data: bytes, length: int, label: str, where: Path) -> bytes:
    """At most `length` + 1 bytes of a frame of zstd. Memory is taken for as many, and a window if no size is stated."""
    import zstandard

    header = zstandard.get_frame_parameters(data)
    if header.content_size != zstandard.CONTENTSIZE_UNKNOWN:
        if header.content_size != length:
            text = f"chunk {printable(label)} decodes to {header.content_size:,} bytes, but its shape needs {length:,}"
            raise CorruptError(text, where=where)
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=length)
    if header.window_size > max(_SMALL_WINDOW, 2 * length):
        raise _too_large_a_window(header.window_size, where)
    decompressor = zstandard.ZstdDecompressor(max_window_size=max(_SMALL_WINDOW, 2 * length))
    with decompressor.stream_reader(BytesIO(data)) as reader:
        body: bytes = reader.read(length + 1)
        return body


def _inflated(data: bytes, compression: str, length: int, label: str, where: Path) -> bytes:
    import zstandard

    try:
        if compression == "gzip":
            with gzip.GzipFile(fileobj=BytesIO(data)) as stream:
                return stream.read(length + 1)
        return _decoded_frame(data, length, label, where)
    except (zstandard.ZstdError, zlib.error, OSError, EOFError) as error:
        raise CorruptError(f"chunk {printable(label)} cannot be decoded: {error}", where=where) from None
