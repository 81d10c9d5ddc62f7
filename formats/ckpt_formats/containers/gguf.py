"""The GGUF container of llama.cpp: a header of typed values and tensors, then the tensors' bytes (spec: ggml, gguf.md).

A file has these parts, all little-endian: `GGUF`, the version, the numbers of tensors and of values; the values, each a
key, a type and a value; for each tensor its name, its axes (innermost first), the type of its blocks and the byte of
the data at which it begins; the data, of which every tensor begins at a multiple of the alignment.

Values keep their types: integers and floats are scalars of NumPy, arrays of them are arrays of NumPy, arrays of texts
are lists. A text that is not UTF-8 is bytes.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ckpt_formats.core.claims import (
    MAX_ELEMENTS,
    MAX_GGML_AXES,
    MAX_HEADER,
    MAX_NAME,
    MAX_NAMES,
    MAX_VALUES,
    check_paid,
)
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.open_file import stream_nbytes
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, kind_of

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
"""Bytes to which tensors are aligned if a file states nothing else."""
ALIGNMENT_KEY = "general.alignment"

_VERSIONS = (2, 3)
_MAX_STORED_NAME = 63
"""Bytes of a tensor's name in ggml."""
_MAX_ALIGNMENT = 1 << 20
_MAX_NESTED = 8
"""Arrays in arrays."""
_TENSOR_NBYTES = 24
_ENTRY_NBYTES = 13
"""The least bytes that a header takes for a tensor, and for a value."""


class BlockType(NamedTuple):
    """A type of ggml: how a number of values in a row are stored together."""

    name: str
    code: int
    values: int
    """Values in a block."""
    nbytes: int
    """Bytes of a block."""
    dtype: DType | None = None
    """The element type, if a block is one plain value."""


_PLAIN = (
    *(("F32", 0, "float32"), ("F16", 1, "float16"), ("BF16", 30, "bfloat16"), ("F64", 28, "float64")),
    *(("I8", 24, "int8"), ("I16", 25, "int16"), ("I32", 26, "int32"), ("I64", 27, "int64")),
)
_QUANTISED = (
    *(("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24), ("Q8_0", 8, 32, 34)),
    *(("Q8_1", 9, 32, 40), ("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110), ("Q4_K", 12, 256, 144)),
    *(("Q5_K", 13, 256, 176), ("Q6_K", 14, 256, 210), ("Q8_K", 15, 256, 292), ("IQ2_XXS", 16, 256, 66)),
    *(("IQ2_XS", 17, 256, 74), ("IQ3_XXS", 18, 256, 98), ("IQ1_S", 19, 256, 50), ("IQ4_NL", 20, 32, 18)),
    *(("IQ3_S", 21, 256, 110), ("IQ2_S", 22, 256, 82), ("IQ4_XS", 23, 256, 136), ("IQ1_M", 29, 256, 56)),
    *(("TQ1_0", 34, 256, 54), ("TQ2_0", 35, 256, 66), ("MXFP4", 39, 32, 17), ("NVFP4", 40, 64, 36)),
    ("Q1_0", 41, 128, 18),
)
BLOCK_TYPES: dict[str, BlockType] = {
    **{name: BlockType(name, code, 1, DTYPES[one].itemsize, DTYPES[one]) for name, code, one in _PLAIN},
    **{name: BlockType(name, code, values, nbytes) for name, code, values, nbytes in _QUANTISED},
}
"""All types by their names in ggml."""
TYPES_OF_DTYPES: dict[DType, BlockType] = {one.dtype: one for one in BLOCK_TYPES.values() if one.dtype is not None}
"""The type of plain values by their element type."""
_BY_CODE = {one.code: one for one in BLOCK_TYPES.values()}

_NUMBERS = {
    code: np.dtype(f"<{kind}")
    for code, kind in ((0, "u1"), (1, "i1"), (2, "u2"), (3, "i2"), (4, "u4"), (5, "i4"), (6, "f4"))
} | {code: np.dtype(f"<{kind}") for code, kind in ((10, "u8"), (11, "i8"), (12, "f8"))}
"""The types of numbers in a header."""
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_CODES = {dtype: code for code, dtype in _NUMBERS.items()}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file: its blocks begin at byte `offset` of the data."""

    name: str
    type: BlockType
    shape: Shape
    """Of the plain values, outermost axis first."""
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, without the padding that follows them."""
        return prod(self.shape) // self.type.values * self.type.nbytes


@dataclass(frozen=True)
class GgufFile:
    """The header of a file."""

    path: Path
    nbytes: int
    values: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]
    data: int
    """The byte of the file at which the data begins."""
    unread_nbytes: int
    """Bytes after the last tensor and its padding."""


def padding(nbytes: int, alignment: int) -> int:
    """How many bytes follow `nbytes` bytes up to the next multiple of the alignment."""
    return -nbytes % alignment


def read_header(path: Path) -> GgufFile:
    """The header of a file. All tensors lie inside the file, one after the other.

    Raises `CorruptError` or `UnsafeError`, and names the wrong entry; `UnsupportedError` for other versions and types.
    """
    with open_regular(path) as file:
        header = _Header(file, stream_nbytes(file), path)
        if header.take(4) != MAGIC:
            raise CorruptError("not a file of GGUF: it does not begin with `GGUF`", where=path)
        version = header.number(4)
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            kind = "a big-endian file" if swapped else f"a file of version {version}"
            raise UnsupportedError(
                f"{kind} of GGUF, which is not read", where=path, hint="Convert the model to GGUF again, version 3."
            )
        tensor_count, value_count = header.number(8), header.number(8)
        check_paid("tensors", tensor_count, _TENSOR_NBYTES, header.left, path)
        check_paid("values", value_count, _ENTRY_NBYTES, header.left, path)
        if max(tensor_count, value_count) > MAX_NAMES:
            raise UnsafeError(f"has {tensor_count:,} tensors and {value_count:,} values", where=path)
        values: dict[str, Value] = {}
        for _ in range(value_count):
            key = header.name("key")
            if key in values:
                raise CorruptError(f"the key `{printable(key)}` appears twice", where=path)
            values[key] = header.value(key)
        alignment = alignment_of(values, path)
        tensors = _tensors(header, tensor_count, alignment)
    data = header.at + padding(header.at, alignment)
    end = data + max((one.offset + one.nbytes for one in tensors), default=0)
    if end > header.nbytes:
        raise CorruptError(
            f"the file has {header.nbytes:,} bytes, its header describes {end:,}",
            where=path,
            hint="It was truncated: copy or download it again.",
        )
    unread = max(0, header.nbytes - end - padding(end - data, alignment)) if tensors else 0
    return GgufFile(path, header.nbytes, values, tensors, data, unread)


def placed(slots: Iterable[tuple[str, BlockType, Shape]], alignment: int) -> tuple[GgufTensor, ...]:
    """Tensors one after the other, by their names, types and shapes.

    Raises `UnsupportedError` for what GGUF cannot hold.
    """
    tensors: list[GgufTensor] = []
    offset = 0
    for name, kind, shape in slots:
        what = f"tensor `{printable(name)}`"
        if len(shape) > MAX_GGML_AXES:
            raise UnsupportedError(f"{what} has {len(shape)} axes: GGUF has at most {MAX_GGML_AXES}")
        if not 0 < len(_encoded(name)) <= _MAX_STORED_NAME:
            raise UnsupportedError(
                f"{what} has no name, or one of over {_MAX_STORED_NAME} bytes, which llama.cpp does not read"
            )
        if shape and shape[-1] % kind.values:
            raise UnsupportedError(
                f"{what} has rows of {shape[-1]} values, which are not whole blocks of {kind.name} ({kind.values})"
            )
        tensors.append(GgufTensor(name, kind, shape, offset))
        offset += tensors[-1].nbytes + padding(tensors[-1].nbytes, alignment)
    return tuple(tensors)


def header_bytes(values: Mapping[str, Value], tensors: Sequence[GgufTensor]) -> bytes:
    """The header of a file with these values and tensors, padded to where the data begins.

    Raises `UnsupportedError` for values that GGUF cannot hold.
    """
    parts = [struct.pack("<4sIQQ", MAGIC, VERSION, len(tensors), len(values))]
    for key, value in values.items():
        parts += [_text(key), _value(value, key)]
    for one in tensors:
        place = (*reversed(one.shape), one.type.code, one.offset)
        parts += [_text(one.name), struct.pack(f"<I{len(one.shape)}QIQ", len(one.shape), *place)]
    head = b"".join(parts)
    return head + bytes(padding(len(head), alignment_of(values)))


def alignment_of(values: Mapping[str, Value], where: Path | None = None) -> int:
    """Bytes to which tensors are aligned in a file with these values. Raises `CorruptError` for an impossible one."""
    value = values.get(ALIGNMENT_KEY, ALIGNMENT)
    if not isinstance(value, (int, np.unsignedinteger)) or isinstance(value, bool):
        raise CorruptError(f"`{ALIGNMENT_KEY}` is {kind_of(value)}, not a number of bytes", where=where)
    alignment = int(value)
    if not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CorruptError(f"tensors are aligned to {alignment:,} bytes, which is not a power of two", where=where)
    return alignment


class _Header:
    """Reads a header front to back. Nothing is read before the file is known to have as many bytes."""

    def __init__(self, file: BinaryIO, nbytes: int, path: Path) -> None:
        self._file = file
        self.nbytes = nbytes
        self.path = path
        self.at = 0
        self._count = 0

    @property
    def left(self) -> int:
        return self.nbytes - self.at

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.left:
            raise CorruptError(
                f"the header needs {nbytes:,} bytes at byte {self.at:,}, and the file has {self.left:,} more",
                where=self.path,
                hint="It was damaged or cut off: copy or download it again.",
            )
        self.at += nbytes
        if self.at > MAX_HEADER:
            raise UnsafeError(f"has a header of over {MAX_HEADER:,} bytes", where=self.path)
        content = self._file.read(nbytes)
        if len(content) < nbytes:
            raise CorruptError(f"ends before byte {self.at:,}", where=self.path)
        return content

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def text(self) -> str | bytes:
        raw = self.take(self.number(8))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def name(self, kind: str) -> str:
        name = self.text()
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise CorruptError(f"a {kind} before byte {self.at:,} is empty, too long or not UTF-8", where=self.path)
        return name

    def value(self, key: str) -> Value:
        code = self.number(4)
        return self._array(key, 0) if code == _ARRAY else self._read_one(key, code)()

    def _read_one(self, key: str, code: int) -> Callable[[], Value]:
        """What reads one value of a type."""
        if code in _NUMBERS:
            dtype = _NUMBERS[code]
            return lambda: np.frombuffer(self.take(dtype.itemsize), dtype)[0]
        if code == _BOOL:
            return lambda: bool(self._bools(key, self.take(1))[0])
        if code == _TEXT:
            return self.text
        raise CorruptError(f"the value of `{printable(key)}` has the unknown type {code}", where=self.path)

    def _array(self, key: str, depth: int) -> Value:
        code, count = self.number(4), self.number(8)
        least = _NUMBERS[code].itemsize if code in _NUMBERS else {_TEXT: 8, _ARRAY: 12}.get(code, 1)
        check_paid(f"elements of `{printable(key)}`", count, least, self.left, self.path)
        if code in _NUMBERS:
            return np.frombuffer(self.take(count * least), _NUMBERS[code])
        if code == _BOOL:
            return self._bools(key, self.take(count))
        self._count += count
        if self._count > MAX_VALUES or depth > _MAX_NESTED:
            raise UnsafeError(
                f"`{printable(key)}` has too many values, or too many arrays in each other", where=self.path
            )
        if code == _ARRAY:
            return [self._array(key, depth + 1) for _ in range(count)]
        read_one = self._read_one(key, code)
        return [read_one() for _ in range(count)]

    def _bools(self, key: str, raw: bytes) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        flags = np.frombuffer(raw, np.uint8)
        if flags.size and flags.max() > 1:
            raise CorruptError(f"the value of `{printable(key)}` is neither true nor false", where=self.path)
        return flags.view(np.bool_)


def _tensors(header: _Header, count: int, alignment: int) -> tuple[GgufTensor, ...]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = header.name("name of a tensor")
        tensor = _tensor(header, name)
        if name in tensors:
            raise CorruptError(f"tensor `{printable(name)}` appears twice", where=header.path)
        tensors[name] = tensor
    expected = 0
    for tensor in sorted(tensors.values(), key=lambda one: (one.offset, one.nbytes)):
        if tensor.offset != expected:
            raise CorruptError(
                f"tensor `{printable(tensor.name)}` begins at byte {tensor.offset:,} of the data, expected "
                f"{expected:,}: tensors overlap, leave a gap or are not aligned",
                where=header.path,
            )
        expected += tensor.nbytes + padding(tensor.nbytes, alignment)
    return tuple(tensors.values())


def _tensor(header: _Header, name: str) -> GgufTensor:
    where = f"{header.path}, tensor `{printable(name)}`"
    axes = header.number(4)
    if axes > MAX_GGML_AXES:
        raise CorruptError(f"has {axes:,} axes: there are at most {MAX_GGML_AXES}", where=where)
    shape = tuple(header.number(8) for _ in range(axes))[::-1]
    if max(shape, default=1) > MAX_ELEMENTS or prod(n or 1 for n in shape) > MAX_ELEMENTS:
        raise CorruptError(f"not a shape: {list(shape)}", where=where)
    code = header.number(4)
    kind = _BY_CODE.get(code)
    if kind is None:
        raise UnsupportedError(
            f"tensor `{printable(name)}` has the unknown type {code}",
            where=header.path,
            hint="Quantise the model to a type that is known, such as Q8_0.",
        )
    if (shape[-1] if shape else 1) % kind.values:
        raise CorruptError(f"rows of {shape[-1:]} values are not whole blocks of {kind.name}", where=where)
    return GgufTensor(name, kind, shape, header.number(8))


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UnsupportedError(f"GGUF cannot store `{printable(text)}`: it has an unpaired surrogate") from None


def _text(text: str | bytes) -> bytes:
    raw = _encoded(text) if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value, key: str) -> bytes:
    """A value with its type."""
    if isinstance(value, (np.ndarray, list)):
        return struct.pack("<I", _ARRAY) + _array(value, key)
    if isinstance(value, (bool, np.bool_)):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, np.generic) and value.dtype in _CODES:
        return struct.pack("<I", _CODES[value.dtype]) + value.tobytes()
    raise _no_value(value, key)


def _array(value: Value, key: str) -> bytes:
    """An array with the type of its elements and their number, without the type of arrays."""
    if isinstance(value, np.ndarray):
        code = _BOOL if value.dtype == np.bool_ else _CODES.get(value.dtype)
        if code is None or value.ndim != 1:
            raise _no_value(value, key)
        return struct.pack("<IQ", code, len(value)) + value.tobytes()
    if all(isinstance(item, (str, bytes)) for item in value):
        return struct.pack("<IQ", _TEXT, len(value)) + b"".join(map(_text, value))
    if not all(isinstance(item, (list, np.ndarray)) for item in value):
        raise _no_value(value, key)
    return struct.pack("<IQ", _ARRAY, len(value)) + b"".join(_array(item, key) for item in value)


def _no_value(value: Value, key: str) -> UnsupportedError:
    return UnsupportedError(f"GGUF cannot store {kind_of(value)} as the value of `{printable(key)}`")
