"""Values as JSON without loss: a value that JSON cannot express is an object with one key that begins with `$`.

1, 1.5, "text", true, null, [..], {..}   themselves
{"$tuple": [..]}  {"$set": [..]}  {"$frozenset": [..]}  {"$size": [..]}
{"$dict": [[key, value], ..]}            keys that are not texts, or begin with `$`
{"$std": {"class": [..], "items": [[key, value], ..], ..}}   an OrderedDict, defaultdict or Counter
{"$int": "0x7b.."}  {"$float": "7ff8000000000000"}  {"$complex": [re, im]}
{"$bytes": "base64"}  {"$bytearray": "base64"}
{"$array": {"dtype", "shape", "data"}}   a NumPy array; a scalar has no shape
{"$tensor": "name"}                      a parameter of the role `extra`
{"$global": ["module", "name"]}          the name of a class or function
{"$object": {"class": [..], ..}}         an object of a class we do not import
"""

import base64
import json
import re
import struct
from collections.abc import Callable
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.containers.keys import checked_keys
from ckpt_formats.core.claims import MAX_DEPTH, MAX_DIGITS, MAX_NUMPY_AXES
from ckpt_formats.core.dtypes import DTYPES, DType, is_text
from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError, UnsupportedError, flaw
from ckpt_formats.core.values import Global, Record, Size, StdDict, TensorName, Value, kind_of, opaque

_MAX_WRITTEN = 32_000_000
"""Values. A text or an array counts more."""
_COUNTED = 32
"""Bytes of a text or an array that count as one value more."""
_MAX_REPEATED = 400_000
"""The same count, for values that are written again because several places share them."""
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, struct.error)
_SIMPLE_TYPE = re.compile(r"[<>|=]?[?bBhHiIlLqQefdgFDGcmMSUaV]\d{0,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")
"""What NumPy calls its own types that are not structured: its parser takes whole programs of commas and brackets."""


def encode(value: Value) -> Any:
    """A value as JSON. Raises `UnsafeError` for a value that contains itself or becomes too large."""
    return _Encoder().encode(value, 0)


def decode(content: Any, where: Path) -> Value:
    """The value whose JSON is `content`: the inverse of `encode`. Raises `CorruptError`."""
    try:
        return _decode(content, 0)
    except UnsafeError as error:
        raise UnsafeError(error.what, where=where) from None
    except _MALFORMED as error:
        raise CorruptError(f"not a typed value: {flaw(error)}", where=where) from None


def same(value: Value, other: Value) -> bool:
    """Whether two values are equal as typed values. False for values with tensors: their bytes are not read."""
    try:
        return bool(encode(value) == encode(other))
    except CkptError:
        return False


class _Encoder:
    """Encodes and counts values. Shared parts are written each time, and a hostile file may share without limit."""

    def __init__(self) -> None:
        self._written = 0
        self._repeated = 0
        self._seen: set[int] = set()

    def encode(self, value: Value, depth: int) -> Any:
        kind = type(value)
        if kind is str and len(value) < _COUNTED:
            self._written += 1  # as `_count` does
        else:
            self._count(value)
        if depth > MAX_DEPTH or self._written > _MAX_WRITTEN or self._repeated > _MAX_REPEATED:
            raise UnsafeError("a value contains itself, or is nested too deeply or repeated too often")
        if value is None or kind is bool or (kind is str and value.isascii()):
            return value
        write = _writer(kind)
        if write is None:
            raise UnsupportedError(f"{kind_of(value)} cannot be a value of a checkpoint")
        return write(value, lambda inner: self.encode(inner, depth + 1))

    def _count(self, value: Value) -> None:
        amount = 1
        if isinstance(value, (str, bytes, bytearray)):
            amount += len(value) // _COUNTED
        elif isinstance(value, np.ndarray):
            amount += value.nbytes // _COUNTED
        self._written += amount
        if amount > 1 or isinstance(value, (list, tuple, dict, set, frozenset, Record)):
            if id(value) in self._seen:
                self._repeated += amount
            self._seen.add(id(value))


Inner = Callable[[Value], Any]


def _str(value: str, inner: Inner) -> Any:
    if not value.isascii() and _SURROGATES.search(value):
        raise UnsupportedError(
            "a text has a character as two surrogates, which JSON cannot distinguish from the character"
        )
    return str(value)


def _int(value: int, inner: Inner) -> Any:
    return int(value) if -(2**63) <= value < 2**64 else {"$int": hex(value)}


def _float(value: float, inner: Inner) -> Any:
    return float(value) if isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _dict(value: dict[Any, Any], inner: Inner) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {inner(key): inner(item) for key, item in value.items()}
    return {"$dict": _pairs(value.items(), inner)}


def _pairs(pairs: Any, inner: Inner) -> list[list[Any]]:
    return [[inner(key), inner(item)] for key, item in pairs]


def _sorted(values: Any, inner: Inner) -> list[Any]:
    """Sets have no order. As JSON they have one, so that equal sets are equal there."""
    return sorted(
        (inner(item) for item in values), key=lambda item: json.dumps(item, sort_keys=True, separators=(",", ":"))
    )


def _std_dict(value: StdDict, inner: Inner) -> Any:
    fields: dict[str, Any] = {"class": _name(value.cls, inner), "items": _pairs(value.items(), inner)}
    if value.factory is not None:
        fields["factory"] = _name(value.factory, inner)
    if value.attrs:
        fields["attrs"] = {inner(key): inner(item) for key, item in value.attrs.items()}
    return {"$std": fields}


def _record(value: Record, inner: Inner) -> Any:
    fields: dict[str, Any] = {"class": _name(value.cls, inner)}
    if value.new:
        fields["new"] = True
    if value.args:
        fields["args"] = [inner(item) for item in value.args]
    if value.kwargs:
        fields["kwargs"] = {inner(key): inner(item) for key, item in value.kwargs.items()}
    if value.state is not None:
        fields["state"] = inner(value.state)
    if value.items:
        fields["items"] = [inner(item) for item in value.items]
    if value.mapping:
        fields["mapping"] = _pairs(value.mapping, inner)
    return {"$object": fields}


def _name(value: Global, inner: Inner) -> list[Any]:
    return [inner(value.module), inner(value.name)]


def _array(value: Any, inner: Inner) -> Any:
    if (record := opaque(value)) is not None:
        return inner(record)
    array = np.asarray(value)
    dtype: DType = array.dtype
    named = DTYPES.get(dtype.name) == dtype
    if not named and not _is_simple(dtype):
        raise UnsupportedError(f"NumPy values of type {dtype} cannot be stored in a checkpoint")
    fields: dict[str, Any] = {"dtype": dtype.name if named else dtype.str, "data": _text(array.tobytes())}
    return {"$array": fields | ({"shape": list(value.shape)} if isinstance(value, np.ndarray) else {})}


def _is_simple(dtype: DType) -> bool:
    """Whether the type is NumPy's own, not structured, and not of Python objects."""
    return not dtype.hasobject and dtype.names is None and dtype.subdtype is None and dtype.isbuiltin != 2


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


# The first match counts, so a subclass precedes its base.
_WRITERS: list[tuple[type, Callable[[Any, Inner], Any]]] = [
    (np.generic, _array),
    (np.ndarray, _array),
    (str, _str),
    (int, _int),
    (float, _float),
    (complex, lambda v, inner: {"$complex": [inner(v.real), inner(v.imag)]}),
    (bytes, lambda v, inner: {"$bytes": _text(v)}),
    (bytearray, lambda v, inner: {"$bytearray": _text(v)}),
    (list, lambda v, inner: [inner(item) for item in v]),
    (Size, lambda v, inner: {"$size": list(v)}),
    (tuple, lambda v, inner: {"$tuple": [inner(item) for item in v]}),
    (StdDict, _std_dict),
    (dict, _dict),
    (set, lambda v, inner: {"$set": _sorted(v, inner)}),
    (frozenset, lambda v, inner: {"$frozenset": _sorted(v, inner)}),
    (TensorName, lambda v, inner: {"$tensor": inner(v.name)}),
    (Global, lambda v, inner: {"$global": _name(v, inner)}),
    (Record, _record),
]


_WRITER_OF: dict[type, Callable[[Any, Inner], Any] | None] = {}


def _writer(kind: type) -> Callable[[Any, Inner], Any] | None:
    if kind not in _WRITER_OF:
        _WRITER_OF[kind] = next((write for base, write in _WRITERS if issubclass(kind, base)), None)
    return _WRITER_OF[kind]


def _decode(content: Any, depth: int) -> Value:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(content, list):
        return [_decode(item, depth + 1) for item in content]
    if not isinstance(content, dict):
        return content
    if len(content) == 1:
        ((key, body),) = content.items()
        if key.startswith("$"):
            return READERS[key](body, lambda inner: _decode(inner, depth + 1))
    return {key: _decode(item, depth + 1) for key, item in content.items()}


def _global(body: Any) -> Global:
    if not isinstance(body, list):
        raise ValueError("the name of a class is not a list of two")
    module, name = map(_require_text, body)
    return Global(module, name)


def _require_text(body: Any) -> str:
    if not isinstance(body, str):
        raise ValueError(f"{body!r:.40} is not a text")
    return body


def _from_std(body: dict[str, Any], inner: Inner) -> StdDict:
    result = StdDict(_global(body["class"]), _global(body["factory"]) if "factory" in body else None)
    keys = checked_keys((inner(key) for key, _ in body["items"]), "")
    result.update(zip(keys, (inner(item) for _, item in body["items"]), strict=True))
    result.attrs = {key: inner(item) for key, item in body.get("attrs", {}).items()}
    return result


def _object(body: dict[str, Any], inner: Inner) -> Record:
    return Record(
        _global(body["class"]),
        tuple(map(inner, body.get("args", []))),
        {str(key): inner(item) for key, item in body.get("kwargs", {}).items()},
        inner(body.get("state")),
        [inner(item) for item in body.get("items", [])],
        [(inner(key), inner(item)) for key, item in body.get("mapping", [])],
        body.get("new") is True,
    )


def _from_array(body: dict[str, Any], inner: Inner) -> Any:
    code, data = _require_text(body["dtype"]), base64.b64decode(body["data"], validate=True)
    if code not in DTYPES and _SIMPLE_TYPE.fullmatch(code) is None:
        raise ValueError(f"an array of type {code!r:.40}")
    dtype = DTYPES[code] if code in DTYPES else np.dtype(code)
    if code not in DTYPES and not _is_simple(dtype):
        raise ValueError(f"an array of type {code!r:.40}")
    shape = tuple(body["shape"]) if "shape" in body else ()
    if len(shape) > MAX_NUMPY_AXES or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise ValueError("an array without a shape")
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError("an array whose shape does not match its data")
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    if dtype.kind == "U":
        if not is_text(array):
            raise ValueError("an array of text with invalid characters")
        array.tolist()  # raises ValueError for other invalid characters
    return array if "shape" in body else array[()]


def _large_int(body: Any) -> int:
    if len(_require_text(body)) > MAX_DIGITS:
        raise ValueError("an integer of too many digits")
    return int(body, 16)


def _dict_of(body: Any, inner: Inner) -> dict[Value, Value]:
    keys = checked_keys((inner(key) for key, _ in body), "")
    return dict(zip(keys, (inner(item) for _, item in body), strict=True))


READERS: dict[str, Callable[[Any, Inner], Value]] = {
    "$int": lambda b, inner: _large_int(b),
    "$float": lambda b, inner: struct.unpack(">d", bytes.fromhex(b))[0],
    "$complex": lambda b, inner: complex(inner(b[0]), inner(b[1])),
    "$bytes": lambda b, inner: base64.b64decode(b, validate=True),
    "$bytearray": lambda b, inner: bytearray(base64.b64decode(b, validate=True)),
    "$size": lambda b, inner: Size(map(int, b)),
    "$std": _from_std,
    "$tuple": lambda b, inner: tuple(map(inner, b)),
    "$dict": lambda b, inner: _dict_of(b, inner),
    "$set": lambda b, inner: set(checked_keys(map(inner, b), "")),
    "$frozenset": lambda b, inner: frozenset(checked_keys(map(inner, b), "")),
    "$tensor": lambda b, inner: TensorName(_require_text(b)),
    "$global": lambda b, inner: _global(b),
    "$object": _object,
    "$array": _from_array,
}
"""What reads a value that JSON has no type for, by the key that marks it."""
