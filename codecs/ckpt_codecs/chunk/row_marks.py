"""The rows of a chunk that changed: how they are marked in bytes, and how they are put back among the others."""

from collections.abc import Mapping
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, DType, Shape
from ckpt_codecs.chunk import streams
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.errors import CodecError

_HEAD = Struct("<BI")
"""The kind and the size of the stream of marks."""


def encode_marks(changed: Array) -> bytes:
    """Return which rows changed, (rows,) bool, as bytes (uint8)."""
    plane = changed.view(np.uint8)
    out = np.empty(plane.size + 64, np.uint8)
    kind, size = streams.encode(plane, out, 0, LEVELS["max"])
    marks = out[:size] if size < plane.size else plane  # a stored plane is not written
    return _HEAD.pack(kind, marks.size) + marks.tobytes()


def decode_marks(data: bytes, shape: Shape) -> tuple[Array, bytes]:
    """Return the numbers of the rows that changed, (changed,) int64, at least one, and the bytes after the marks.

    Raises:
        CodecError: The bytes are no marks of so many rows, or mark none.
    """
    if len(shape) != 2 or len(data) < _HEAD.size:
        raise CodecError("a chunk of rows has no rows, or ends in its head")
    kind, size = _HEAD.unpack_from(data)
    end = _HEAD.size + size
    if end > len(data):
        raise CodecError("a chunk of rows ends in its marks")
    plane = streams.decode(kind, np.frombuffer(data, np.uint8), _HEAD.size, end, shape[0], "changed rows")
    if plane.max(initial=0) != 1:
        raise CodecError("a chunk of rows has none that changed, or marks them by other numbers than 1")
    return np.flatnonzero(plane), data[end:]


def states_of_rows(
    before: Mapping[str, Array], shape: Shape, dtypes: Mapping[str, DType], numbers: Array
) -> dict[str, Array]:
    """Return the rows with these numbers, (changed,) int64, of all states before.

    Raises:
        CodecError: A state is missing, or has another shape or dtype.
    """
    for name, dtype in dtypes.items():
        old = before.get(name)
        if old is None or old.dtype != dtype or old.shape != shape:
            raise CodecError(f"rows were encoded relative to another state {name}")
    return {name: before[name][numbers] for name in dtypes}


def with_rows(before: Mapping[str, Array], decoded: Mapping[str, Array], numbers: Array) -> dict[str, Array]:
    """Return the states before, with those rows replaced that were decoded: of the numbers (changed,) int64."""
    result = {}
    for name, values in decoded.items():
        result[name] = before[name].copy()
        result[name][numbers] = values
    return result
