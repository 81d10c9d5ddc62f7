"""MessagePack as Flax and Orbax write it: trees of maps and lists, whose arrays are of an extension type.

Reading gives inert values, and the places of arrays in the file. Nothing in a file is imported or called.
Sources: the MessagePack specification (msgpack/spec.md); flax.serialization; orbax.checkpoint.msgpack_utils.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ckpt_formats.core.claims import MAX_NUMPY_AXES, MAX_TREE_DEPTH, MAX_VALUES
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import open_regular, unreadable
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import FileBlob, Fragment, Tensor, from_fragments
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.core.views import reshaped

MAX_CHUNK = 1 << 30
"""Bytes of an array above which Flax stores it in chunks."""
_MAX_TEXT = 1 << 20
"""Bytes of a text, or of a value of bytes."""
_MAX_READ = 1 << 28
"""Bytes of all values that are no arrays."""
_NDARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4
_CHUNKED, _SHAPE, _CHUNKS = "__msgpack_chunked_array__", "shape", "chunks"
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    **dict(zip(range(0xCC, 0xD0), (">B", ">H", ">I", ">Q"), strict=True)),
    **dict(zip(range(0xD0, 0xD4), (">b", ">h", ">i", ">q"), strict=True)),
}
_LENGTHS = {1: ">B", 2: ">H", 4: ">I"}
_DICT = re.compile(rb"([\x81-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9-\xdb]", re.DOTALL)


def begins_as_dict(path: Path) -> bool:
    """Is the first value of a file a map with a text as its first key? Flax and Orbax give files no suffix."""
    try:
        with path.open("rb") as file:
            head = file.read(6)
    except CkptError:
        raise
    except OSError:
        return False
    return _DICT.match(head) is not None


def read_tree(path: Path) -> tuple[Value, int]:
    """The value in a file, with a `Tensor` for each array, and the bytes of the file. Reads no array.

    Raises `CorruptError` for what is no MessagePack, `UnsupportedError` for what Flax does not write, `UnsafeError`
    for what would exhaust memory, `NotFoundError` if the file cannot be read.
    """
    with open_regular(path) as file:
        try:
            reader = _TreeReader(path, file)
            root = reader.value(0)
            reader.check_end()
            return root, reader.nbytes
        except CkptError:
            raise
        except OSError as error:
            raise unreadable(error, path) from error


class _TreeReader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._at = 0
        self._values = self._read_nbytes = 0
        self.nbytes = file.seek(0, 2)
        file.seek(0)

    def value(self, depth: int) -> Value:
        """The next value."""
        self._count(depth)
        code = self._byte()
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code < 0x90:
            return self._map(code & 0x0F, depth)
        if code < 0xA0:
            return self._list(code & 0x0F, depth)
        if code < 0xC0:
            return self._text(code & 0x1F)
        if code in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[code]
        if code in _NUMBERS:
            return self._number(_NUMBERS[code])
        return self._sized(code, depth)

    def check_end(self) -> None:
        if self._at != self.nbytes:
            raise self._corrupt(f"{self.nbytes - self._at:,} bytes follow after the tree")

    def _sized(self, code: int, depth: int) -> Value:
        """A value whose length comes first."""
        if 0xC4 <= code <= 0xC6:
            return self._bytes(self._length(1 << (code - 0xC4)))
        if 0xC7 <= code <= 0xC9:
            return self._extension(self._length(1 << (code - 0xC7)), depth)
        if 0xD4 <= code <= 0xD8:
            return self._extension(1 << (code - 0xD4), depth)
        if 0xD9 <= code <= 0xDB:
            return self._text(self._length(1 << (code - 0xD9)))
        if code in (0xDC, 0xDD):
            return self._list(self._length(2 if code == 0xDC else 4), depth)
        if code in (0xDE, 0xDF):
            return self._map(self._length(2 if code == 0xDE else 4), depth)
        raise self._corrupt(f"byte {code:#x} begins no value")

    def _map(self, count: int, depth: int) -> Value:
        self._check_room(2 * count)
        result: dict[Value, Value] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise UnsupportedError("a key of a map is not a text", where=self._path)
            if key in result:
                raise self._corrupt(f"the key `{printable(key[:60])}` is there twice in one map")
            result[key] = self.value(depth + 1)
        return self._joined(result) if _CHUNKED in result else result

    def _list(self, count: int, depth: int) -> Value:
        self._check_room(count)
        return [self.value(depth + 1) for _ in range(count)]

    def _extension(self, nbytes: int, depth: int) -> Value:
        code = self._number(">b")
        end = self._at + nbytes
        self._check_room(nbytes)
        if code == _TUPLE:
            values = self.value(depth + 1)
            if not isinstance(values, list) or self._at != end:
                raise self._corrupt("a tuple is not a list")
            return tuple(values)
        if code == _COMPLEX:
            parts = self.value(depth + 1)
            numbers = isinstance(parts, list) and len(parts) == 2 and all(type(part) is float for part in parts)
            if not numbers or self._at != end:
                raise self._corrupt("a complex number is not two floats")
            return complex(*parts)
        if code not in (_NDARRAY, _SCALAR):
            raise UnsupportedError(f"has the extension type {code}, which Flax does not write", where=self._path)
        return self._array(end, depth)

    def _array(self, end: int, depth: int) -> Tensor:
        """An array: a list of its shape, the name of its type, and its bytes in C order."""
        if self._byte() != 0x93:
            raise self._corrupt("an array is not a list of shape, type and bytes")
        shape, name = self.value(depth + 1), self.value(depth + 1)
        if isinstance(name, bytes):
            name = name.decode("ascii", "replace")
        if not isinstance(shape, list) or len(shape) > MAX_NUMPY_AXES or not all(map(_is_length, shape)):
            raise self._corrupt("the shape of an array is not a list of lengths")
        if not isinstance(name, str) or name not in DTYPES:
            raise UnsupportedError(f"holds an array of type `{printable(str(name)[:60])}`", where=self._path)
        code = self._byte()
        widths = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
        if code in widths:
            nbytes = self._length(widths[code])
        elif 0xA0 <= code < 0xC0:
            nbytes = code & 0x1F
        else:
            raise self._corrupt("an array has no bytes")
        dtype = DTYPES[name]
        if prod(shape) * dtype.itemsize != nbytes or self._at + nbytes != end:
            raise self._corrupt(f"an array of shape {shape} and type {name} has {nbytes:,} bytes")
        blob = FileBlob.packed(self._path, self._at, tuple(shape), dtype)
        self._at = end
        self._file.seek(end)
        return Tensor.of(blob)

    def _joined(self, stored: dict[Value, Value]) -> Tensor:
        """An array that is stored in chunks: flat parts of it, in C order."""
        lengths, chunks = (self._numbered(stored.get(key)) for key in (_SHAPE, _CHUNKS))
        if len(lengths) > MAX_NUMPY_AXES or not all(map(_is_length, lengths)):
            raise self._corrupt("the shape of an array in chunks is not a list of lengths")
        tensors = [one for one in chunks if isinstance(one, Tensor) and len(one.shape) == 1 == len(one.fragments)]
        dtypes: set[DType] = {chunk.dtype for chunk in tensors}
        size = sum(chunk.size for chunk in tensors)
        if len(tensors) != len(chunks) or len(dtypes) != 1 or size != prod(lengths):
            raise self._corrupt(f"an array of shape {list(lengths)} has {size:,} elements in {len(chunks)} chunks")
        at, fragments = 0, list[Fragment]()
        for chunk in tensors:
            fragments.append(Fragment(Box((at,), (at + chunk.size,)), chunk.fragments[0].blob))
            at += chunk.size
        return reshaped(from_fragments((size,), fragments, dtypes.pop()), 0, tuple(lengths))

    def _numbered(self, stored: Value) -> list[Value]:
        """The values of a map with the keys 0, 1, ..."""
        if not isinstance(stored, dict) or set(stored) != {str(i) for i in range(len(stored))}:
            raise self._corrupt("an array in chunks does not number its parts from 0 on")
        return [stored[str(i)] for i in range(len(stored))]

    def _text(self, nbytes: int) -> str:
        try:
            return self._bytes(nbytes).decode("utf-8")
        except UnicodeDecodeError:
            raise self._corrupt("a text is not UTF-8") from None

    def _bytes(self, nbytes: int) -> bytes:
        if nbytes > _MAX_TEXT:
            raise UnsafeError(f"holds a value of {nbytes:,} bytes that is not an array", where=self._path)
        self._check_room(nbytes)
        self._at += nbytes
        self._read_nbytes += nbytes
        if self._read_nbytes > _MAX_READ:
            raise UnsafeError(f"holds more than {_MAX_READ:,} bytes that are not arrays", where=self._path)
        read = self._file.read(nbytes)
        if len(read) != nbytes:
            raise self._corrupt("it became shorter while it was read")
        return read

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _length(self, width: int) -> int:
        return int(self._number(_LENGTHS[width]))

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0]

    def _check_room(self, nbytes: int) -> None:
        """Raises `CorruptError` if the file has not so many bytes any more: each value takes one at least."""
        if nbytes > self.nbytes - self._at:
            raise CorruptError(
                f"the file ends at byte {self.nbytes:,}, but a value at byte {self._at:,} is longer",
                where=self._path,
                hint="It was truncated, or is still being written: copy it again.",
            )

    def _count(self, depth: int) -> None:
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_TREE_DEPTH:
            raise UnsafeError("it has too many values, or is nested too deeply", where=self._path)

    def _corrupt(self, what: str) -> CorruptError:
        return CorruptError(f"not a MessagePack file of Flax: at byte {self._at:,}, {what}", where=self._path)


def _is_length(value: Value) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


# Writing: the bytes that `msgpack.packb` writes


def map_header(count: int) -> bytes:
    """The bytes before a map's keys and values."""
    return _sized(count, ((16, 0x80), (1 << 16, 0xDE), (1 << 32, 0xDF)))


def text_bytes(text: str) -> bytes:
    """A text."""
    encoded = text.encode("utf-8")
    return _sized(len(encoded), ((32, 0xA0), (1 << 8, 0xD9), (1 << 16, 0xDA), (1 << 32, 0xDB))) + encoded


def natural_bytes(number: int) -> bytes:
    """A whole number from 0."""
    for width, code in ((1, 0xCC), (2, 0xCD), (4, 0xCE), (8, 0xCF)):
        if number < 0x80:
            return bytes([number])
        if number < 1 << (8 * width):
            return bytes([code]) + number.to_bytes(width, "big")
    raise ValueError(f"{number} has more than 64 bits")


@dataclass(frozen=True)
class ArrayHeader:
    """What comes before the bytes of an array."""

    shape: Shape
    dtype: DType

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def encode(self) -> bytes:
        """The header. Raises `ValueError` for an array that is too large to be stored in one."""
        inner = b"".join((b"\x93", _list_header(len(self.shape)), *map(natural_bytes, self.shape)))
        inner += text_bytes(self.dtype.name)
        inner += _sized(self.nbytes, ((1 << 8, 0xC4), (1 << 16, 0xC5), (1 << 32, 0xC6)))
        total = len(inner) + self.nbytes
        if total in (1, 2, 4, 8, 16):
            outer = bytes([0xD4 + total.bit_length() - 1])
        else:
            outer = _sized(total, ((1 << 8, 0xC7), (1 << 16, 0xC8), (1 << 32, 0xC9)))
        return outer + bytes([_NDARRAY]) + inner


def array_pieces(shape: Shape, dtype: DType) -> Iterator[tuple[bytes, int]]:
    """How an array is stored: bytes of headers, and how many bytes of the array follow each of them."""
    whole = ArrayHeader(shape, dtype)
    if whole.nbytes <= MAX_CHUNK:
        yield whole.encode(), whole.nbytes
        return
    step, size = max(1, MAX_CHUNK // dtype.itemsize), prod(shape)
    head = map_header(3) + text_bytes(_CHUNKED) + b"\xc3" + text_bytes(_SHAPE) + map_header(len(shape))
    head += b"".join(text_bytes(str(i)) + natural_bytes(length) for i, length in enumerate(shape))
    head += text_bytes(_CHUNKS) + map_header(-(-size // step))
    for i, start in enumerate(range(0, size, step)):
        chunk = ArrayHeader((min(step, size - start),), dtype)
        yield head + text_bytes(str(i)) + chunk.encode(), chunk.nbytes
        head = b""


def _list_header(count: int) -> bytes:
    return _sized(count, ((16, 0x90), (1 << 16, 0xDC), (1 << 32, 0xDD)))


def _sized(length: int, codes: tuple[tuple[int, int], ...]) -> bytes:
    """The shortest header of a length: the codes below 0xc0 and 0x80 to 0x9f hold it themselves."""
    for limit, code in codes:
        if length < limit:
            if limit <= 32:
                return bytes([code | length])
            return bytes([code]) + length.to_bytes(limit.bit_length() // 8, "big")
    raise ValueError(f"{length:,} is too long for MessagePack")
