"""NumPy's arrays and scalars, built from bytes after a check.

A `numpy.dtype` in a pickle stays a `Record`; `dtype_of` returns the type that
it means. Arrays of Python objects, of dates or with named fields are not built,
because NumPy would have to interpret them. In their place is an array of one
object, the `Record` of what the pickle contains (see `core.values.opaque`).
"""

import re
from math import prod
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ckpt_formats.core.claims import MAX_NUMPY_AXES
from ckpt_formats.core.dtypes import DTYPES, DType, is_text
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.values import Global, Record, Value

Array = np.ndarray[Any, DType]

RECONSTRUCT = Global("numpy.core.multiarray", "_reconstruct")

_CODE = re.compile(r"[<>=|]?([biufcSUV?])(\d{0,9})\Z")
_ORDERS = ("<", ">", "=", "|")


def dtype_of(record: Value, where: str) -> DType:
    """The element type that `numpy.dtype(code, False, True)` and its state mean.

    Raises `UnsupportedError` if it is not a plain number, boolean or string of fixed length.
    """
    if type(record) is not Record or record.cls != Global("numpy", "dtype") or not record.args:
        raise CorruptError("a NumPy value without an element type", where=where)
    code, state = record.args[0], record.state
    if type(code) is Global:
        if code.module != "ml_dtypes" or not hasattr(ml_dtypes, code.name) or code.name not in DTYPES:
            raise UnsupportedError(f"NumPy values of type {code}", where=where)
        return DTYPES[code.name]
    match = _CODE.match(code) if type(code) is str else None
    if match is None:
        raise UnsupportedError(f"NumPy values of type {code!r:.40}", where=where)
    order = code[0] if code[0] in _ORDERS else "="
    if state is not None:
        # (version, byte order, subarray, names, fields, itemsize, alignment, flags[, metadata])
        if type(state) is not tuple or len(state) not in (8, 9) or state[1] not in _ORDERS:
            raise CorruptError("a malformed NumPy element type", where=where)
        if any(part is not None for part in state[2:5]) or (match[1] == "V" and not match[2]):
            raise UnsupportedError("structured NumPy arrays", where=where)
        order = state[1]
    try:
        return np.dtype(order + match[1] + match[2])
    except (TypeError, ValueError):
        raise UnsupportedError(f"NumPy values of type {code!r:.40}", where=where) from None


def scalar_of(args: tuple[Value, ...], where: str) -> Value:
    """`numpy.core.multiarray.scalar(dtype, bytes)`: a NumPy scalar."""
    if len(args) != 2 or type(args[1]) not in (bytes, str):
        raise CorruptError("a malformed NumPy scalar", where=where)
    return _from_bytes(dtype_of(args[0], where), (), "C", args[1], where)[()]


def buffer_array(args: tuple[Value, ...], where: str) -> Array:
    """`numpy.core.numeric._frombuffer(bytes, dtype, shape, order)`, which protocol 5 writes: an array of `shape`."""
    if len(args) != 4 or type(args[0]) not in (bytes, bytearray) or args[3] not in ("C", "F"):
        raise CorruptError("a malformed NumPy array", where=where)
    return _from_bytes(dtype_of(args[1], where), args[2], args[3], args[0], where)


def unfilled_array() -> Array:
    """What `numpy.core.multiarray._reconstruct` returns: an array that a later BUILD fills. (0,) int8."""
    return np.empty(0, np.int8)


def fill(array: Array, state: Value, where: str) -> None:
    """Fill an array of `unfilled_array` in place, as BUILD does.

    `state`: (version, shape, dtype, is_fortran, bytes). Raises `CorruptError`.
    """
    if type(state) is not tuple or len(state) != 5 or array.shape != (0,) or array.dtype != np.int8:
        raise CorruptError("a malformed NumPy array", where=where)
    _, shape, dtype, fortran, data = state
    if type(data) not in (bytes, str, list) or type(fortran) not in (bool, int):
        raise CorruptError("a malformed NumPy array", where=where)
    try:
        kind = dtype_of(dtype, where)
    except UnsupportedError:
        _fill_with_record(array, state, where)
        return
    if type(data) is list:
        raise CorruptError("a malformed NumPy array", where=where)
    decoded = _from_bytes(kind, shape, "F" if fortran else "C", data, where)
    # In place, because the pickle may refer to the array already.
    order: Literal["C", "F"] = "F" if fortran else "C"
    content: Any = (
        1,
        decoded.shape,
        decoded.dtype,
        order == "F",
        decoded.tobytes(order),
    )  # NumPy's stub wants a numpy.bool
    array.__setstate__(content)


def _fill_with_record(array: Array, state: Value, where: str) -> None:
    """Turn an array, in place, into an array of one object: the `Record` of what the pickle contains."""
    _checked_shape(state[1], where)
    record = Record(RECONSTRUCT, (Global("numpy", "ndarray"), (0,), b"b"), state=state)
    content: Any = (1, (), np.dtype(object), False, [record])
    array.__setstate__(content)


def _from_bytes(dtype: DType, shape: Value, order: str, data: bytes | bytearray | str, where: str) -> Array:
    if isinstance(data, str):  # Python 2 wrote byte strings in this way
        try:
            data = data.encode("latin-1")
        except UnicodeEncodeError:
            raise CorruptError(
                "the bytes of a NumPy array contain characters that are not bytes", where=where
            ) from None
    size = prod(_checked_shape(shape, where))
    if size * dtype.itemsize != len(data) or (dtype.itemsize == 0 and size > 1):
        raise CorruptError(
            f"a NumPy array of {size} elements of {dtype.itemsize} bytes has {len(data)} bytes of data", where=where
        )
    if not data:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(bytes(data), dtype)
    if dtype.kind == "U" and not is_text(flat):
        raise CorruptError("a NumPy array of text with invalid characters", where=where)
    if order == "F":
        return flat.reshape(shape[::-1]).T
    return flat.reshape(shape)


def _checked_shape(shape: Value, where: str) -> Shape:
    if (
        not isinstance(shape, tuple)
        or len(shape) > MAX_NUMPY_AXES
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    ):
        raise CorruptError("a NumPy array of impossible shape", where=where)
    return shape
