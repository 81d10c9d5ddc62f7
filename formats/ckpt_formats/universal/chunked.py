"""Values that lie encoded in a file, chunk by chunk: only the chunks that a block touches are read and decoded.

A chunk is a range of the tensor's elements in C order, given to the codec as `rows x columns` or as a vector. The index
has its length, the checksum of its bytes and that of its values, so every array that a codec gives back is checked
before anybody sees it. See docs/format.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
import xxhash

from ckpt_codecs.base import Codec
from ckpt_codecs.errors import CodecError
from ckpt_codecs.scratch import temporary_buffer, thread_buffer
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, flat_boxes, flat_ends
from ckpt_formats.core.seals import Leaves, Seal
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, FileBlob, FlatRangeBlob
from ckpt_formats.universal.entry import DIGEST, CodedChunks

_HINT = "The file was damaged after it was written: restore it from a copy. `ckpt verify` lists all damage."


@dataclass(frozen=True, eq=False)
class ChunkStore:
    """Encoded chunks in a file, one after another."""

    path: Path
    offset: int
    chunks: CodedChunks
    label: str
    """What the tensor is called, for messages."""

    @property
    def count(self) -> int:
        return len(self.chunks.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, with the filling behind the last."""
        return self.chunks.total_nbytes

    def chunk(self, index: int, reader: Reader) -> memoryview:
        """The bytes of a chunk, valid until this thread asks for the next one.

        Raises `CorruptError` if they are damaged.
        """
        begin, nbytes = int(self.chunks.starts[index]), int(self.chunks.nbytes[index])
        # With the last chunk comes the filling, which its checksum covers.
        length = nbytes if index + 1 < self.count else self.nbytes - begin
        data = thread_buffer("stored", length)
        reader.read_into(self.path, self.offset + begin, data.data)
        if xxhash.xxh3_64_intdigest(data.data) != int(self.chunks.stored[index]):
            raise CorruptError(
                f"{self.label}: chunk {index} of {self.count}: its {length:,} bytes do not fit their checksum",
                where=self.path,
                hint=_HINT,
            )
        reader.chunks += 1
        return data[:nbytes].data

    def source(self, indices: range) -> FileBlob:
        """The bytes of neighbouring chunks: of all, with the filling behind the last one."""
        starts = self.chunks.starts
        begin = int(starts[indices.start]) if indices else 0
        stop = int(starts[indices.stop]) if indices.stop < self.count else self.nbytes
        return FileBlob.packed(self.path, self.offset + begin, (stop - begin,), np.dtype(np.uint8), self.seal())

    def corrupt(self, index: int, codec: str, why: str) -> CorruptError:
        return CorruptError(
            f"{self.label}: chunk {index} of {self.count} cannot be decoded with `{codec}`: {why}",
            where=self.path,
            hint=_HINT,
        )

    def seal(self) -> Seal:
        """The checksums of all stored bytes."""
        lengths = self.chunks.nbytes.astype(np.int64)
        if len(lengths):
            lengths[-1] += self.nbytes - int(lengths.sum())
        digests = self.chunks.stored.astype(">u8").tobytes()
        digest = int(xxhash.xxh3_128_intdigest(digests))
        leaves = Leaves(lengths, digests)
        return Seal(self.path, self.offset, self.nbytes, "xxh3-64", digest, self.label, leaves=leaves)


@dataclass(frozen=True, eq=False)
class ChunkedTensor:
    """Where the chunks of one whole tensor are, and how to decode them."""

    stored: ChunkStore
    shape: Shape
    dtype: DType
    codec: Codec
    digests: bytes
    """The XXH3-128 of the values of each chunk, one after another."""
    base: Blob | None = None

    @cached_property
    def chunking(self) -> Chunking:
        return Chunking.default(self.shape)

    @property
    def raw_nbytes(self) -> int:
        """Of the values, decoded."""
        return prod(self.shape) * self.dtype.itemsize

    def values(self, index: int, reader: Reader) -> Array:
        """A chunk, decoded and checked: (size) of the dtype; valid until the next one is cached.

        Raises `CorruptError`.
        """
        start, stop = self.chunking.range(index)
        nbytes = (stop - start) * self.dtype.itemsize
        decoded = reader.cached_or_filled(
            self._key(index), nbytes, lambda buffer: self._decode(index, buffer.view(self.dtype), reader)
        )
        return decoded.view(self.dtype)

    def fill(self, out: Array, index: int, reader: Reader) -> None:
        """The same into `out`, (size) of the dtype: for a chunk that is not needed again."""
        cached = reader.cached(self._key(index))
        if cached is not None:
            out[:] = cached.view(self.dtype)
        else:
            self._decode(index, out, reader)

    def has_chunks_of(self, other: "ChunkedTensor") -> bool:
        """Do the same chunks hold the same elements?"""
        return self.chunking == other.chunking

    def _key(self, index: int) -> tuple["ChunkedTensor", int]:
        return self, index  # and no place in a file: two states of which no bytes are stored are at the same

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
        stored, form = self.stored, self.chunking.chunk_shape(out.size)
        data = stored.chunk(index, reader)
        try:
            self.codec.decode_into(data, out.reshape(form), None if base is None else base.reshape(form))
        except CodecError as error:
            raise stored.corrupt(index, self.codec.name, str(error)) from None
        if not is_digest(out, self.digests, index):
            raise stored.corrupt(index, self.codec.name, "its values do not fit their checksum")


class ChunkDigests:
    """The XXH3-128 of each chunk of a tensor, computed while its values are given in order, in runs of any length."""

    def __init__(self, tensor: Blob) -> None:
        chunking = Chunking.default(tensor.shape)
        self._nbytes = chunking.chunk_size * tensor.dtype.itemsize
        self._hash = xxhash.xxh3_128()
        self._nbytes_hashed = 0
        """Bytes of the chunk that is not complete."""
        self._digests = bytearray()

    def add(self, values: Array) -> None:
        """The next values: contiguous, of any shape, of the dtype of the tensor."""
        data, at = values.reshape(-1).view(np.uint8).data, 0
        while at < len(data):
            part = data[at : at + self._nbytes - self._nbytes_hashed]
            at += len(part)
            if len(part) == self._nbytes:
                self._digests += xxhash.xxh3_128_digest(part)
                continue
            self._hash.update(part)
            self._nbytes_hashed += len(part)
            if self._nbytes_hashed == self._nbytes:
                self._end_chunk()

    def digests(self) -> bytes:
        """The checksums of all chunks, one after another, when all values were given."""
        if self._nbytes_hashed:
            self._end_chunk()
        return bytes(self._digests)

    def _end_chunk(self) -> None:
        self._digests += self._hash.digest()
        self._hash.reset()
        self._nbytes_hashed = 0


def chunk_digests(values: Array) -> bytes:
    """The XXH3-128 of each chunk of all values of a tensor. `values`: (shape), contiguous, any dtype."""
    data, chunking = values.reshape(-1).view(np.uint8).data, Chunking.default(values.shape)
    nbytes = chunking.chunk_size * values.dtype.itemsize
    if len(data) <= nbytes:
        return xxhash.xxh3_128_digest(data) if data else b""
    return b"".join(xxhash.xxh3_128_digest(data[at : at + nbytes]) for at in range(0, len(data), nbytes))


def is_digest(values: Array, digests: bytes, index: int) -> bool:
    """Whether the XXH3-128 of contiguous values, of any shape and dtype, is that of chunk `index`."""
    actual = xxhash.xxh3_128_digest(values.reshape(-1).view(np.uint8).data)
    return actual == digests[index * DIGEST : (index + 1) * DIGEST]


@dataclass(frozen=True)
class EncodedBlob(BlockBlob):
    """A block of a coded tensor."""

    store: ChunkedTensor
    box: Box

    @classmethod
    def whole(cls, store: ChunkedTensor) -> "EncodedBlob":
        return cls(store, Box.whole(store.shape))

    @property
    def dtype(self) -> DType:
        return self.store.dtype

    @property
    def is_full(self) -> bool:
        return self.box.shape == self.store.shape

    @property
    def reads_in_place(self) -> bool:
        return True

    def read_into(self, out: Array, reader: Reader) -> None:
        store = self.store
        read_block(out, self.box, store.chunking, store.values, store.fill, reader)

    def sources(self) -> Iterator[FileBlob]:
        yield self.store.stored.source(self.store.chunking.touched(self.box))
        yield from super().sources()

    def parts(self) -> tuple[Blob, ...]:
        return () if self.store.base is None else (self.store.base.crop(self.box),)


def read_block(
    out: Array,
    box: Box,
    chunking: Chunking,
    values: Callable[[int, Reader], Array],
    fill: Callable[[Array, int, Reader], None],
    reader: Reader,
) -> None:
    """Fill `out` with the block `box` of a tensor: this shape, any dtype.

    `values` gives a chunk, (n,), that is kept for the next call; `fill` writes a chunk that is not needed again.
    """
    first, last = flat_ends(box, chunking.shape)
    if last - first != box.size or not out.flags.c_contiguous:
        read_chunks(out, box, chunking, lambda index: values(index, reader))
        return
    # A run of elements in C order: whole chunks are decoded where they are to lie.
    flat = out.reshape(-1)
    for index in chunking.touched(box):
        start, stop = chunking.range(index)
        low, high = max(start, first), min(stop, last)
        part = flat[low - first : high - first]
        if (low, high) == (start, stop):
            fill(part, index, reader)
        else:
            part[:] = values(index, reader)[low - start : high - start]


def read_chunks(out: Array, box: Box, chunking: Chunking, values: Callable[[int], Array]) -> None:
    """Fill `out` with the block `box` of a tensor: this shape, any dtype. `values` gives a chunk of it, (n,)."""
    for index in chunking.touched(box):
        at, chunk = 0, None
        for block in flat_boxes(chunking.shape, *chunking.range(index)):
            common = block & box
            if common is not None:
                chunk = values(index) if chunk is None else chunk
                part = chunk[at : at + block.size].reshape(block.shape)
                out[common.within(box).index] = part[common.within(block).index]
            at += block.size
