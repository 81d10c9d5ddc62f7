"""Values that lie coded in a file, chunk by chunk: only the chunks that a block touches are read and decoded.

    chunk 0 | chunk 1 | ... | zeros up to a multiple of 8 | directory

A chunk is a range of the tensor's elements in C order, given to the codec as
`rows x columns` or as a vector. The directory has 16 bytes for each: its length,
and the XXH3-64 of its values, so every array that a codec gives back is checked
before anybody sees it. See docs/format.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import ClassVar

import numpy as np
import xxhash

from ckpt_codecs import Codec, CodecError
from ckpt_codecs.scratch import temporary_buffer, thread_buffer
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.files import Reader, Seal
from ckpt_formats.core.geometry import Box, Shape, flat_boxes, flat_ends
from ckpt_formats.core.tensor import Array, Blob, FileBlob, FlatRangeBlob

MOST_ELEMENTS = 1 << 22
"""Of a chunk: what a reader must be ready to hold."""
OVERHEAD = 1024
"""Bytes by which a coded chunk may be longer than its values."""
ENTRY = np.dtype([("nbytes", "<u8"), ("values", "<u8")])
"""Of the directory."""
ALIGNMENT = 8


@dataclass(frozen=True)
class ChunkDirectory:
    """Chunks of bytes, one after another, and the directory behind them that says where each begins."""

    path: Path
    offset: int
    nbytes: int
    """Of chunks, filling and directory."""
    count: int
    max_nbytes: int
    """Bytes of one chunk."""
    label: str
    seal: Seal | None = None

    def chunk(self, index: int, reader: Reader) -> tuple[memoryview, int]:
        """A chunk's bytes, and the XXH3-64 of what is to be decoded from them. Raises `Corrupt`.

        The bytes are valid until this thread asks for the next chunk.
        """
        directory = reader.cached_or((self.path, self.offset, "directory"), lambda: self._directory(reader))
        begin, nbytes = int(directory["begin"][index]), int(directory["nbytes"][index])
        # With the last chunk comes the rest, so that whoever reads all chunks in order has seen every sealed byte.
        length = nbytes if index + 1 < self.count else self.nbytes - begin
        data = thread_buffer("listed", length)
        reader.read_into(self.path, self.offset + begin, data.data, self.seal)
        return data[:nbytes].data, int(directory["values"][index])

    def _directory(self, reader: Reader) -> Array:
        ends = self.nbytes - self.count * ENTRY.itemsize
        listed = np.empty(self.count, ENTRY)
        reader.read_into(self.path, self.offset + ends, listed.view(np.uint8).data)
        sane = self.count == 0 or int(listed["nbytes"].max()) <= self.max_nbytes
        total = int(listed["nbytes"].sum()) if sane else 0
        if not sane or not 0 <= ends - total < ALIGNMENT:
            raise Corrupt(
                f"{self.label}: the directory of its chunks does not fit their {ends:,} bytes", where=self.path
            )
        directory = np.empty(self.count, self._WITH_STARTS)
        directory["nbytes"], directory["values"] = listed["nbytes"], listed["values"]
        directory["begin"] = np.cumsum(listed["nbytes"]) - listed["nbytes"]
        return directory

    _WITH_STARTS: ClassVar[DType] = np.dtype([*ENTRY.descr, ("begin", "<u8")])

    def corrupt(self, index: int, codec: str, why: str) -> Corrupt:
        return Corrupt(
            f"{self.label}: chunk {index} of {self.count} cannot be decoded with `{codec}`: {why}",
            where=self.path,
            hint="The file was damaged after it was written: restore it from a copy. `ckpt verify` lists all damage.",
        )


@dataclass(frozen=True)
class ChunkedTensor:
    """Where the chunks of one whole tensor are, and how to decode them."""

    path: Path
    offset: int
    nbytes: int
    """Of chunks, filling and directory."""
    shape: Shape
    dtype: DType
    chunk: Shape
    """`(rows, columns)` or `(elements,)` of every chunk but the last, which may be shorter."""
    codec: Codec
    label: str
    """What the tensor is called, for messages."""
    base: Blob | None = None
    seal: Seal | None = None

    @cached_property
    def chunking(self) -> Chunking:
        return Chunking(self.shape, self.chunk)

    @property
    def raw_nbytes(self) -> int:
        """Of the values, decoded."""
        return prod(self.shape) * self.dtype.itemsize

    def values(self, index: int, reader: Reader) -> Array:
        """A chunk, decoded and checked, as a vector, valid until the reader keeps another. Raises `Corrupt`."""
        start, stop = self.chunking.range(index)
        nbytes = (stop - start) * self.dtype.itemsize
        decoded = reader.cached_or_filled(
            self._key(index), nbytes, lambda buffer: self._decode(index, buffer.view(self.dtype), reader)
        )
        return decoded.view(self.dtype)

    def fill(self, out: Array, index: int, reader: Reader) -> None:
        """The same into `out`, a vector: for a chunk that nobody else will ask for."""
        cached = reader.cached(self._key(index))
        if cached is not None:
            out[:] = cached.view(self.dtype)
        else:
            self._decode(index, out, reader)

    def has_chunks_of(self, other: "ChunkedTensor") -> bool:
        """Do the same chunks hold the same elements?"""
        return self.chunking == other.chunking

    def _key(self, index: int) -> tuple[Path, int, int]:
        return self.path, self.offset, index

    @property
    def _directory(self) -> ChunkDirectory:
        limit = self.chunking.chunk_size * self.dtype.itemsize + OVERHEAD
        return ChunkDirectory(self.path, self.offset, self.nbytes, self.chunking.count, limit, self.label, self.seal)

    def _decode(self, index: int, out: Array, reader: Reader) -> None:
        base = self.base
        if base is None:
            self._decode_with(None, index, out, reader)
        elif isinstance(base, EncodedBlob) and base.is_full and base.store.has_chunks_of(self):
            self._decode_with(base.store.values(index, reader), index, out, reader)
        else:
            with temporary_buffer(out.size * base.dtype.itemsize) as buffer:
                values, (start, stop) = buffer.view(base.dtype), self.chunking.range(index)
                FlatRangeBlob(base, start, stop).read_into(values, reader)
                self._decode_with(values, index, out, reader)

    def _decode_with(self, base: Array | None, index: int, out: Array, reader: Reader) -> None:
        directory, form = self._directory, self.chunking.chunk_shape(out.size)
        data, digest = directory.chunk(index, reader)
        try:
            self.codec.decode_into(data, out.reshape(form), None if base is None else base.reshape(form))
        except CodecError as error:
            raise directory.corrupt(index, self.codec.name, str(error)) from None
        if xxhash.xxh3_64_intdigest(out.view(np.uint8).data) != digest:
            raise directory.corrupt(index, self.codec.name, "its values do not fit their checksum")


@dataclass(frozen=True)
class EncodedBlob(Blob):
    """A block of a coded tensor."""

    store: ChunkedTensor
    box: Box

    @classmethod
    def whole(cls, store: ChunkedTensor) -> "EncodedBlob":
        return cls(store, Box.whole(store.shape))

    @property
    def shape(self) -> Shape:
        return self.box.shape

    @property
    def dtype(self) -> DType:
        return self.store.dtype

    def crop(self, box: Box) -> "EncodedBlob":
        return EncodedBlob(self.store, box.shift(self.box.start))

    @property
    def is_full(self) -> bool:
        return self.box.shape == self.store.shape

    def read_into(self, out: Array, reader: Reader) -> None:
        store = self.store
        first, last = flat_ends(self.box, store.shape)
        if last - first != self.box.size or not out.flags.c_contiguous:
            read_chunks(out, self.box, store.chunking, lambda index: store.values(index, reader))
            return
        # A run of elements in C order: whole chunks are decoded where they are to lie.
        flat = out.reshape(-1)
        for index in store.chunking.touched(self.box):
            start, stop = store.chunking.range(index)
            low, high = max(start, first), min(stop, last)
            part = flat[low - first : high - first]
            if (low, high) == (start, stop):
                store.fill(part, index, reader)
            else:
                part[:] = store.values(index, reader)[low - start : high - start]

    def sources(self) -> Iterator[FileBlob]:
        store = self.store
        yield FileBlob.packed(store.path, store.offset, (store.nbytes,), np.dtype(np.uint8), store.seal)
        yield from super().sources()

    def parts(self) -> tuple[Blob, ...]:
        return () if self.store.base is None else (self.store.base.crop(self.box),)


def read_chunks(out: Array, box: Box, chunking: Chunking, values: Callable[[int], Array]) -> None:
    """Fill `out`, of the shape of `box`, with this block of a tensor; `values` gives a chunk of it, (n,)."""
    for index in chunking.touched(box):
        at, chunk = 0, None
        for block in flat_boxes(chunking.shape, *chunking.range(index)):
            common = block & box
            if common is not None:
                chunk = values(index) if chunk is None else chunk
                part = chunk[at : at + block.size].reshape(block.shape)
                out[common.within(box).index] = part[common.within(block).index]
            at += block.size
