"""The metadata of one array of zarr 2 or 3: its shape, its grid of chunks, and how a chunk is encoded.

    NAME/.zarray, NAME/0.1       zarr 2: metadata, and the chunk of row 0 and column 1 of the grid
    NAME/zarr.json, NAME/c/0/1   zarr 3

Read are chunks in C order, plain or compressed by zstd or gzip, and shards (`sharding_indexed`) of such chunks.
Everything else is refused by its name.

Source: zarr-specs, v2 and v3; TensorStore's drivers `zarr` and `zarr3`.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import add, lt, mul
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ckpt_formats.core.claims import MAX_AXES, MAX_ELEMENTS
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import c_strides
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import brief, is_natural

METADATA = (".zarray", "zarr.json")
"""The names of the metadata, of zarr 2 and of zarr 3."""

Compression = Literal["zstd", "gzip"] | None

_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


@dataclass(frozen=True)
class ChunkEncoding:
    """How the values of a chunk are encoded."""

    compression: Compression = None
    checksum: bool = False
    """Whether a CRC-32C of four bytes follows."""


@dataclass(frozen=True)
class Sharding:
    """A chunk of the grid is a shard: chunks of this shape, and an index of where each is."""

    shape: Shape
    index_at_end: bool
    index_checksum: bool


@dataclass(frozen=True)
class ArrayLayout:
    """One array, as its metadata state it."""

    shape: Shape
    dtype: DType
    chunks: Shape
    """The shape of a chunk of the grid: each is stored with it, those at the edge too."""
    separator: str
    prefix: str
    """What precedes the numbers in the key of a chunk: nothing, or `c`."""
    codec: ChunkEncoding
    sharding: Sharding | None
    fill: bytes
    """The element that a chunk which is not stored has everywhere."""

    @cached_property
    def grid(self) -> Shape:
        """The number of chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))

    @cached_property
    def strides(self) -> Shape:
        """Bytes from one element of a decoded chunk to the next, along each axis."""
        return c_strides(self.chunks, self.dtype.itemsize)

    @cached_property
    def chunk_nbytes(self) -> int:
        """The bytes of a decoded chunk."""
        return prod(self.chunks) * self.dtype.itemsize

    def place(self, key: str) -> Shape | None:
        """The place of a chunk in the grid, by its key after the array's name; None for other keys."""
        if self.prefix:
            first, separator, key = key.partition(self.separator)
            if first != self.prefix or bool(separator) != bool(self.shape):
                return None
        if not self.shape:
            return () if key == ("" if self.prefix else "0") else None
        try:
            at = tuple(map(int, key.split(self.separator, len(self.shape))))
        except ValueError:  # no number, or one of too many digits
            return None
        if len(at) != len(self.shape) or self.separator.join(map(str, at)) != key or min(at) < 0:
            return None
        return at if all(map(lt, at, self.grid)) else None

    def box(self, at: Shape) -> Box:
        """The block of the array that a chunk has."""
        start = tuple(map(mul, at, self.chunks))  # functions in C: a model has hundreds of thousands of chunks
        return Box(start, tuple(map(min, map(add, start, self.chunks), self.shape)))


def layout_of(name: str, content: Any, where: Path) -> ArrayLayout:
    """The array that the metadata `name`, parsed from JSON, describe.

    Raises `CorruptError` for other content, `UnsafeError` for impossible sizes, `UnsupportedError` for what is not
    read.
    """
    if not isinstance(content, dict):
        raise CorruptError(f"{name} is not an object", where=where)
    try:
        layout = (_second if name == ".zarray" else _third)(content, where)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{name} is not of zarr's form: {brief(str(error))}", where=where) from None
    if len(layout.shape) > MAX_AXES or len(layout.chunks) != len(layout.shape):
        raise CorruptError(f"{name}: shape {brief(layout.shape)} with chunks {brief(layout.chunks)}", where=where)
    if 0 in layout.chunks or max(prod(layout.shape), prod(layout.chunks)) * layout.dtype.itemsize > MAX_ELEMENTS:
        raise UnsafeError(f"{name}: a shape {brief(layout.shape)} that no array can have", where=where)
    inner = layout.sharding.shape if layout.sharding else layout.chunks
    if len(inner) != len(layout.chunks) or any(i < 1 or c % i for i, c in zip(inner, layout.chunks, strict=True)):
        raise CorruptError(f"{name}: shards of {brief(layout.chunks)} with chunks {brief(inner)}", where=where)
    return layout


def _second(content: dict[str, Any], where: Path) -> ArrayLayout:
    if content["zarr_format"] != 2:
        raise UnsupportedError(f"zarr {brief(content['zarr_format'])} is not read", where=where)
    shape, chunks = _shape(content["shape"]), _shape(content["chunks"])
    if content.get("order", "C") != "C" and len(shape) > 1:
        raise UnsupportedError("the array is stored in Fortran's order, which is not read", where=where)
    if content.get("filters"):
        raise UnsupportedError(f"filters of zarr are not read: {brief(content['filters'])}", where=where)
    compressor = content.get("compressor")
    method = None if compressor is None else compressor["id"]
    separator = content.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise CorruptError(f".zarray: a separator {brief(separator)}", where=where)
    dtype = _second_dtype(content["dtype"], where)
    fill = _fill(content.get("fill_value"), dtype, where)
    return ArrayLayout(shape, dtype, chunks, separator, "", ChunkEncoding(_compression(method, where)), None, fill)


def _third(content: dict[str, Any], where: Path) -> ArrayLayout:
    if content["zarr_format"] != 3 or content["node_type"] != "array":
        raise UnsupportedError(f"zarr {brief(content['zarr_format'])} is not read", where=where)
    if content["chunk_grid"]["name"] != "regular":
        raise UnsupportedError(f"a grid {brief(content['chunk_grid']['name'])} is not read", where=where)
    shape, chunks = _shape(content["shape"]), _shape(content["chunk_grid"]["configuration"]["chunk_shape"])
    encoding = content["chunk_key_encoding"]
    is_default = encoding["name"] == "default"
    if not is_default and encoding["name"] != "v2":
        raise UnsupportedError(f"keys of chunks as {brief(encoding['name'])} are not read", where=where)
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    if separator not in (".", "/"):
        raise CorruptError(f"zarr.json: a separator {brief(separator)}", where=where)
    if content["data_type"] not in DTYPES:
        raise UnsupportedError(f"elements of type {brief(content['data_type'])} are not read", where=where)
    dtype = DTYPES[content["data_type"]]
    codecs, sharding = content["codecs"], None
    if len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed":
        configuration = codecs[0]["configuration"]
        index = [codec["name"] for codec in configuration["index_codecs"]]
        if index not in (["bytes"], ["bytes", "crc32c"]):
            raise UnsupportedError(f"an index of shards as {brief(index)} is not read", where=where)
        _check_endian(configuration["index_codecs"][0], 8, where)
        location = configuration.get("index_location", "end")
        sharding = Sharding(_shape(configuration["chunk_shape"]), location == "end", len(index) == 2)
        codecs = configuration["codecs"]
    prefix = "c" if is_default else ""
    fill = _fill(content.get("fill_value"), dtype, where)
    return ArrayLayout(shape, dtype, chunks, separator, prefix, _codec(codecs, dtype, where), sharding, fill)


def _codec(codecs: list[Any], dtype: DType, where: Path) -> ChunkEncoding:
    if len(codecs) > 1 and codecs[0]["name"] == "transpose":
        order = codecs[0]["configuration"]["order"]
        codecs = codecs[1:] if order == sorted(order) else codecs
    names = [codec["name"] for codec in codecs]
    checksum = names[-1:] == ["crc32c"]
    rest = names[:-1] if checksum else names
    if rest[:1] != ["bytes"] or len(rest) > 2:
        raise UnsupportedError(f"chunks that are encoded by {brief(names)} are not read", where=where)
    _check_endian(codecs[0], dtype.itemsize, where)
    return ChunkEncoding(_compression(rest[1], where) if rest[1:] else None, checksum)


def _check_endian(codec: Any, itemsize: int, where: Path) -> None:
    if itemsize > 1 and codec.get("configuration", {}).get("endian", "little") != "little":
        raise UnsupportedError("big-endian values are not read", where=where)


def _compression(method: Any, where: Path) -> Compression:
    if method in ("zstd", "gzip", None):
        return method  # type: ignore[no-any-return]
    raise UnsupportedError(f"chunks that are compressed by {brief(method)} are not read", where=where)


def _second_dtype(text: Any, where: Path) -> DType:
    """The type of an array of zarr 2: `<f4` as NumPy writes it, or the name of a type that NumPy lacks."""
    match = re.fullmatch(r"([<>|])([biufc])(\d{1,2})", text)
    name = text if match is None else _KINDS[match[2]] + ("" if match[2] == "b" else str(8 * int(match[3])))
    if name not in DTYPES:
        raise UnsupportedError(f"elements of type {printable(text[:60])} are not read", where=where)
    if match is not None and match[1] == ">" and DTYPES[name].itemsize > 1:
        raise UnsupportedError("big-endian values are not read", where=where)
    return DTYPES[name]


def _shape(value: Any) -> Shape:
    if not isinstance(value, list) or not all(is_natural(n) for n in value):
        raise TypeError(f"a shape {brief(value)}")
    return tuple(value)


def _fill(value: Any, dtype: DType, where: Path) -> bytes:
    """The bytes of the element of chunks that are not stored; zeros if none is stated."""
    if value is None:
        return bytes(dtype.itemsize)
    if isinstance(value, str) and re.fullmatch(r"0x[0-9a-fA-F]{1,16}", value):
        return int(value, 16).to_bytes(8, "little")[: dtype.itemsize]
    try:
        if isinstance(value, list):
            value = complex(*value) if dtype.kind == "c" else np.array(value).reshape(())
        with np.errstate(all="ignore"):
            return np.array(float(value) if isinstance(value, str) else value).astype(dtype).tobytes()
    except (TypeError, ValueError, OverflowError):
        raise CorruptError(f"a fill value {brief(value)}", where=where) from None
