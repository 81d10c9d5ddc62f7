"""Values that lie coded in a file, chunk by chunk: only the chunks that a block touches are read and decoded.

    chunk 0 | chunk 1 | ... | zeros up to a multiple of 8 | directory

A chunk is a range of the tensor's elements in C order, given to the codec as
`rows x columns` or as a vector. The directory has 16 bytes for each: its length,
and the XXH3-64 of its values, so every array that a codec gives back is checked
before anybody sees it. See docs/format.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar

import numpy as np
import xxhash

from ckpt_codecs import Codec, CodecError
from ckpt_formats.dtypes import DType
from ckpt_formats.errors import Corrupt
from ckpt_formats.files import Reader, Seal
from ckpt_formats.geometry import Box, Shape, flat_boxes
from ckpt_formats.tensor import Array, Blob, Range, Raw

MOST_ELEMENTS = 1 << 22
"""Of a chunk: what a reader must be ready to hold."""
OVERHEAD = 1024
"""Bytes by which a coded chunk may be longer than its values."""
ENTRY = np.dtype([("nbytes", "<u8"), ("values", "<u8")])
"""Of the directory."""
ALIGNMENT = 8


@dataclass(frozen=True)
class Listed:
    """Chunks of bytes, one after another, and the directory behind them that says where each begins."""

    path: Path
    offset: int
    nbytes: int
    """Of chunks, filling and directory."""
    count: int
    most: int
    """Bytes of one chunk."""
    label: str
    seal: Seal | None = None

    def chunk(self, index: int, reader: Reader) -> tuple[memoryview, int]:
        """A chunk's bytes, and the XXH3-64 of what is to be decoded from them. Raises `Corrupt`."""
        directory = reader.keep((self.path, self.offset, "directory"), lambda: self._directory(reader))
        begin, nbytes = int(directory["begin"][index]), int(directory["nbytes"][index])
        # With the last chunk comes the rest, so that whoever reads all chunks in order has seen every sealed byte.
        taken = nbytes if index + 1 < self.count else self.nbytes - begin
        data = np.empty(taken, np.uint8)
        reader.read_into(self.path, self.offset + begin, data.data, self.seal)
        return data[:nbytes].data, int(directory["values"][index])

    def _directory(self, reader: Reader) -> Array:
        ends = self.nbytes - self.count * ENTRY.itemsize
        listed = np.empty(self.count, ENTRY)
        reader.read_into(self.path, self.offset + ends, listed.view(np.uint8).data)
        sane = self.count == 0 or int(listed["nbytes"].max()) <= self.most
        total = int(listed["nbytes"].sum()) if sane else 0
        if not sane or not 0 <= ends - total < ALIGNMENT:
            raise Corrupt(
                f"{self.label}: the directory of its chunks does not fit their {ends:,} bytes", where=self.path
            )
        found = np.empty(self.count, self._FOUND)
        found["nbytes"], found["values"] = listed["nbytes"], listed["values"]
        found["begin"] = np.cumsum(listed["nbytes"]) - listed["nbytes"]
        return found

    _FOUND: ClassVar[DType] = np.dtype([*ENTRY.descr, ("begin", "<u8")])

    def corrupt(self, index: int, codec: str, why: str) -> Corrupt:
        return Corrupt(
            f"{self.label}: chunk {index} of {self.count} cannot be decoded with `{codec}`: {why}",
            where=self.path,
            hint="The file was damaged after it was written: restore it from a copy. `ckpt verify` lists all damage.",
        )


@dataclass(frozen=True)
class Store:
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

    @property
    def count(self) -> int:
        return chunk_count(self.shape, self.chunk)

    @property
    def raw_nbytes(self) -> int:
        """Of the values, decoded."""
        return prod(self.shape) * self.dtype.itemsize

    def flat_range(self, index: int) -> tuple[int, int]:
        """The elements that a chunk holds, counted in C order."""
        each = prod(self.chunk)
        return index * each, min((index + 1) * each, prod(self.shape))

    def values(self, index: int, reader: Reader) -> Array:
        """A chunk, decoded and checked, as a vector. Raises `Corrupt`."""
        return reader.keep((self.path, self.offset, index), lambda: self._decode(index, reader))

    @property
    def _listed(self) -> Listed:
        most = prod(self.chunk) * self.dtype.itemsize + OVERHEAD
        return Listed(self.path, self.offset, self.nbytes, self.count, most, self.label, self.seal)

    def _decode(self, index: int, reader: Reader) -> Array:
        listed = self._listed
        data, digest = listed.chunk(index, reader)
        start, stop = self.flat_range(index)
        base = None
        if self.base is not None:
            base = np.empty(stop - start, self.base.dtype)
            Range(self.base, start, stop).read_into(base, reader)
            base = base.reshape(chunk_form(self.chunk, stop - start))
        form = chunk_form(self.chunk, stop - start)
        try:
            values = np.ascontiguousarray(self.codec.decode(data, form, self.dtype, base))
        except CodecError as error:
            raise listed.corrupt(index, self.codec.name, str(error)) from None
        if values.shape != form or values.dtype != self.dtype:
            raise listed.corrupt(index, self.codec.name, "another shape or type came out")
        flat = values.reshape(-1)
        if xxhash.xxh3_64_intdigest(flat.view(np.uint8).data) != digest:
            raise listed.corrupt(index, self.codec.name, "its values do not fit their checksum")
        return flat


@dataclass(frozen=True)
class Coded:
    """A block of a coded tensor."""

    store: Store
    box: Box

    @classmethod
    def whole(cls, store: Store) -> "Coded":
        return cls(store, Box.whole(store.shape))

    @property
    def shape(self) -> Shape:
        return self.box.shape

    @property
    def dtype(self) -> DType:
        return self.store.dtype

    def crop(self, box: Box) -> "Coded":
        return Coded(self.store, box.shift(self.box.start))

    def read_into(self, out: Array, reader: Reader) -> None:
        read_chunks(out, self.box, self.store.shape, self.store.chunk, lambda index: self.store.values(index, reader))

    def sources(self) -> Iterator[Raw]:
        store = self.store
        yield Raw.packed(store.path, store.offset, (store.nbytes,), np.dtype(np.uint8), store.seal)
        if store.base is not None:
            yield from store.base.crop(self.box).sources()

    def flaws(self) -> Iterator[str]:
        return iter(()) if self.store.base is None else self.store.base.flaws()


def read_chunks(out: Array, box: Box, shape: Shape, chunk: Shape, values: Callable[[int], Array]) -> None:
    """Fill `out` with block `box` of a tensor that is cut into chunks; `values` gives one of them, as a vector."""
    each = prod(chunk)
    for index in _touched(box, shape, each):
        at, found = 0, None
        for block in flat_boxes(shape, index * each, min((index + 1) * each, prod(shape))):
            common = block & box
            if common is not None:
                found = values(index) if found is None else found
                held = found[at : at + block.size].reshape(block.shape)
                out[common.within(box).index] = held[common.within(block).index]
            at += block.size


def _touched(box: Box, shape: Shape, each: int) -> range:
    """The chunks among which all are that hold an element of the block."""
    if not box.size:
        return range(0)
    first = last = 0
    for length, low, high in zip(shape, box.start, box.stop, strict=True):
        first, last = first * length + low, last * length + high - 1
    return range(first // each, last // each + 1)


def chunk_count(shape: Shape, chunk: Shape) -> int:
    """How many chunks a tensor has."""
    return -(-prod(shape) // prod(chunk))


def chunk_form(chunk: Shape, size: int) -> Shape:
    """The shape in which a codec is given a chunk of `size` elements; the last may have fewer rows."""
    return (size,) if len(chunk) == 1 else (size // chunk[1], chunk[1])
