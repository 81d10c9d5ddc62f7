"""Values as JSON that loses nothing: what JSON cannot say is an object with one key that begins with `$`.

1, 1.5, "text", true, null, [..], {..}   themselves
{"$tuple": [..]}  {"$set": [..]}  {"$frozenset": [..]}  {"$size": [..]}
{"$dict": [[key, value], ..]}            keys that are not texts, or begin with `$`
{"$std": {"class": [..], "items": [[key, value], ..], ..}}   an OrderedDict, defaultdict or Counter
{"$int": "123.."}  {"$float": "7ff8000000000000"}  {"$complex": [re, im]}
{"$bytes": "base64"}  {"$bytearray": "base64"}
{"$array": {"dtype", "shape", "data"}}   a NumPy array; a scalar has no shape
{"$tensor": "name"}                      a parameter of the role `extra`
{"$global": ["module", "name"]}          the name of a class or function
{"$object": {"class": [..], ..}}         an object of a class we do not import
"""

import base64
import binascii
import struct
from collections.abc import Callable
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.errors import Corrupt, Unsafe, Unsupported
from ckpt_formats.values import Global, Record, Size, StdDict, TensorName, Value

_MOST_NODES = 20_000_000
_MOST_DEPTH = 150


def encode(value: Value) -> Any:
    """A value as JSON. Raises `Unsafe` for one that contains itself or is absurdly large written out."""
    return _Encoder().encode(value, 0)


def decode(said: Any, where: Path) -> Value:
    """The value that `encode` was given. Raises `Corrupt`."""
    try:
        return _decode(said, 0)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, struct.error, binascii.Error) as error:
        raise Corrupt(f"not a typed value: {error}", where=where) from None


class _Encoder:
    """Counts what it writes: shared parts are written out each time, and a file may share them without end."""

    def __init__(self) -> None:
        self._nodes = 0

    def encode(self, value: Value, depth: int) -> Any:
        self._nodes += 1
        if depth > _MOST_DEPTH or self._nodes > _MOST_NODES:
            raise Unsafe("a value that contains itself, or is nested or repeated without end")
        if value is None or isinstance(value, (bool, str)):
            return value
        for kind, write in _WRITERS:
            if isinstance(value, kind):
                return write(value, lambda inner: self.encode(inner, depth + 1))
        raise Unsupported(f"a value of type {type(value).__name__} has no place in a checkpoint")


Inner = Callable[[Value], Any]


def _int(value: int, inner: Inner) -> Any:
    return int(value) if -(2**63) <= value < 2**64 else {"$int": str(value)}


def _float(value: float, inner: Inner) -> Any:
    return float(value) if isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _dict(value: dict[Any, Any], inner: Inner) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: inner(item) for key, item in value.items()}
    return {"$dict": _pairs(value.items(), inner)}


def _pairs(pairs: Any, inner: Inner) -> list[list[Any]]:
    return [[inner(key), inner(item)] for key, item in pairs]


def _sorted(values: Any, inner: Inner) -> list[Any]:
    return sorted((inner(item) for item in values), key=repr)


def _std_dict(value: StdDict, inner: Inner) -> Any:
    said: dict[str, Any] = {"class": [value.cls.module, value.cls.name], "items": _pairs(value.items(), inner)}
    if value.factory is not None:
        said["factory"] = [value.factory.module, value.factory.name]
    if value.attrs:
        said["attrs"] = inner(value.attrs)
    return {"$std": said}


def _record(value: Record, inner: Inner) -> Any:
    said: dict[str, Any] = {"class": [value.cls.module, value.cls.name]}
    if value.new:
        said["new"] = True
    if value.args:
        said["args"] = [inner(item) for item in value.args]
    if value.kwargs:
        said["kwargs"] = {key: inner(item) for key, item in value.kwargs.items()}
    if value.state is not None:
        said["state"] = inner(value.state)
    if value.items:
        said["items"] = [inner(item) for item in value.items]
    if value.mapping:
        said["mapping"] = _pairs(value.mapping, inner)
    return {"$object": said}


def _array(value: Any, inner: Inner) -> Any:
    said = {"dtype": value.dtype.str, "data": _text(np.asarray(value).tobytes())}
    return {"$array": said | ({"shape": list(value.shape)} if isinstance(value, np.ndarray) else {})}


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


# The first match counts, so a subclass stands before its base.
_WRITERS: list[tuple[type, Callable[[Any, Inner], Any]]] = [
    (np.generic, _array),
    (np.ndarray, _array),
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
    (TensorName, lambda v, inner: {"$tensor": v.name}),
    (Global, lambda v, inner: {"$global": [v.module, v.name]}),
    (Record, _record),
]


def _decode(said: Any, depth: int) -> Value:
    if depth > _MOST_DEPTH * 4:
        raise ValueError("nested too deeply")
    if isinstance(said, list):
        return [_decode(item, depth + 1) for item in said]
    if not isinstance(said, dict):
        return said
    if len(said) == 1:
        ((key, body),) = said.items()
        if key.startswith("$"):
            return _READERS[key](body, lambda inner: _decode(inner, depth + 1))
    return {key: _decode(item, depth + 1) for key, item in said.items()}


def _global(body: Any) -> Global:
    module, name = body
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("the name of a class is not a text")
    return Global(module, name)


def _from_std(body: dict[str, Any], inner: Inner) -> StdDict:
    made = StdDict(_global(body["class"]), _global(body["factory"]) if "factory" in body else None)
    made.update((inner(key), inner(item)) for key, item in body["items"])
    made.attrs = inner(body.get("attrs", {}))
    return made


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
    dtype, data = np.dtype(body["dtype"]), base64.b64decode(body["data"], validate=True)
    if dtype.kind not in "biufcSUmM":
        raise ValueError(f"array of type {body['dtype']!r}")
    shape = tuple(body["shape"]) if "shape" in body else ()
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError("an array whose shape does not fit its data")
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    return array if "shape" in body else array[()]


_READERS: dict[str, Callable[[Any, Inner], Value]] = {
    "$int": lambda b, inner: int(b),
    "$float": lambda b, inner: struct.unpack(">d", bytes.fromhex(b))[0],
    "$complex": lambda b, inner: complex(inner(b[0]), inner(b[1])),
    "$bytes": lambda b, inner: base64.b64decode(b, validate=True),
    "$bytearray": lambda b, inner: bytearray(base64.b64decode(b, validate=True)),
    "$size": lambda b, inner: Size(map(int, b)),
    "$std": _from_std,
    "$tuple": lambda b, inner: tuple(map(inner, b)),
    "$dict": lambda b, inner: {inner(key): inner(item) for key, item in b},
    "$set": lambda b, inner: set(map(inner, b)),
    "$frozenset": lambda b, inner: frozenset(map(inner, b)),
    "$tensor": lambda b, inner: TensorName(str(b)),
    "$global": lambda b, inner: _global(b),
    "$object": _object,
    "$array": _from_array,
}
