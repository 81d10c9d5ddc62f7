"""Columns of numbers in one safetensors file. The file may be hostile.

A column is a vector of uint8, uint16, uint32 or uint64, little-endian, or has several numbers in each row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.containers.safetensors import TensorSlot, header_bytes, parse_json_object
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Array

_TAGS = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}


def dump(columns: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """The bytes of the file. Columns of larger numbers come first, so that all are aligned.

    `columns`: (rows,) or (rows, width) uint8, uint16, uint32 or uint64.
    """
    slots, parts, at = [], [], 0
    for name, column in sorted(columns.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        slots.append(TensorSlot(name, column.dtype, column.shape, at))
        parts.append(np.ascontiguousarray(column).tobytes())
        at += column.nbytes
    return b"".join([header_bytes(slots, metadata), *parts])


def load(data: bytes, types: Mapping[str, str], path: Path) -> dict[str, Array]:
    """The columns in the bytes of a file: (rows,) or (rows, width) uint8, ..., uint64. They share its memory.

    `types`: the NumPy type of each column that must be there, such as `<u4`. Raises `CorruptError`.
    """
    nbytes = int.from_bytes(data[:8], "little")
    if not 2 <= nbytes <= len(data) - 8:
        raise CorruptError(f"not an index: a header of {nbytes} bytes in {len(data)}", where=path)
    header = parse_json_object(data[8 : 8 + nbytes], path)
    header.pop("__metadata__", None)
    if missing := sorted(set(types) ^ set(header)):
        raise CorruptError(f"the index is not valid: column {missing[0]!r:.60} is missing or unknown", where=path)
    begin, columns, at = 8 + nbytes, {}, 0
    for name, slot in sorted(header.items(), key=_first_offset):
        column = _column(data, begin, slot, types[name])
        if column is None or slot["data_offsets"][0] != at:
            raise CorruptError(f"the index is not valid: the entry of column {name!r:.60}", where=path)
        columns[name], at = column, slot["data_offsets"][1]
    if begin + at != len(data):
        raise CorruptError(f"the index has {len(data)} bytes, its header describes {begin + at}", where=path)
    return columns


def _first_offset(item: tuple[str, Any]) -> tuple[int, int]:
    try:
        start, stop = item[1]["data_offsets"]
        return int(start), int(stop)
    except (TypeError, ValueError, KeyError):
        return 0, 0


def _column(data: bytes, begin: int, slot: Any, dtype: str) -> Array | None:
    """A column; None if its entry is not valid."""
    try:
        shape, (start, stop) = tuple(slot["shape"]), slot["data_offsets"]
        sane = _TAGS[slot["dtype"]] == dtype and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        if not sane or len(shape) not in (1, 2) or stop > len(data) - begin:
            return None
        count, width = shape[0], shape[1] if len(shape) == 2 else 1
        if not 0 < width <= 64 or stop - start != count * width * np.dtype(dtype).itemsize:
            return None
        return np.frombuffer(data, dtype, count * width, begin + start).reshape(shape)
    except (TypeError, ValueError, KeyError):
        return None
