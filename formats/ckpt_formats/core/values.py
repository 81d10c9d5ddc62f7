"""The non-tensor items of a checkpoint, as plain data.

A value is None, bool, int, float, complex, str, bytes, list, tuple, dict,
set, frozenset, a NumPy array or scalar, or one of the classes below, which
represent what a pickle names. Nothing here imports or calls it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Value = Any  # a recursive union, of which mypy would make no use


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function, never the thing itself."""

    module: str
    name: str

    @property
    def qualname(self) -> str:
        return f"{self.module}.{self.name}"

    def __str__(self) -> str:
        return self.qualname


@dataclass(slots=True, eq=False)
class Record:
    """An object of a class that we do not import: what the pickle states about it.

    It is mutable, because a pickle builds an object in steps and may refer to it
    before the last step. After the file is read, nothing changes it.
    """

    cls: Global
    args: tuple[Value, ...] = ()
    kwargs: dict[str, Value] = field(default_factory=dict)
    state: Value = None
    items: list[Value] = field(default_factory=list)
    mapping: list[tuple[Value, Value]] = field(default_factory=list)
    new: bool = False
    """Made by NEWOBJ (`cls.__new__(cls, *args)`), not by calling `cls(*args)`."""

    def get(self, name: str, default: Value = None) -> Value:
        """An attribute of the object, of a class with `__dict__` or with slots."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        for part in parts:
            if isinstance(part, dict) and name in part:
                return part[name]
        return default


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor in the extras: the name of the parameter of the role `extra` that has its values."""

    name: str


class Size(tuple[int, ...]):
    """A `torch.Size`: a tuple for readers, and written back as a `torch.Size`."""

    __slots__ = ()


class StdDict(dict[Value, Value]):
    """An `OrderedDict`, `defaultdict` or `Counter`: a dict for readers, and written back as its own class.

    Not the real classes: a `defaultdict` calls its factory, and attributes that
    a hostile file sets on an `OrderedDict` could hide its methods.
    """

    __slots__ = ("attrs", "cls", "factory")

    def __init__(self, cls: Global = Global("collections", "OrderedDict"), factory: Global | None = None) -> None:
        super().__init__()
        self.cls = cls
        self.factory = factory
        self.attrs: dict[str, Value] = {}
        """Attributes of the object itself, such as `_metadata` of a module's state dict."""


def kind_of(value: Value) -> str:
    """The type of a value, for people: never the name of a class of ckpt.

    >>> kind_of({}), kind_of(1.5), kind_of(Record(Global("argparse", "Namespace")))
    ('a dict', 'a float', 'an object of class argparse.Namespace')
    """
    if isinstance(value, Record):
        return f"an object of class {value.cls}"
    if isinstance(value, Global):
        return f"the name of a class or function ({value})"
    if isinstance(value, dict):
        return "a dict"
    name = type(value).__name__
    if value is None or isinstance(value, int):
        return {"NoneType": "None", "bool": "a bool"}.get(name, "an int")
    return f"a {name}" if isinstance(value, _PYTHON) else "a tensor" if "ensor" in name else "a storage"


_PYTHON = (float, complex, str, bytes, bytearray, list, tuple, set, frozenset, np.ndarray, np.generic)


def opaque(value: Value) -> Value:
    """The `Record` in a 0-dimensional object array, for an array that we do not build; None for any other value."""
    return value[()] if isinstance(value, np.ndarray) and value.dtype == object and value.shape == () else None


def tensor_names(value: Value) -> Iterator[str]:
    """The names of all tensors in a value that is a tree (no cycles), as values from JSON are."""
    if isinstance(value, TensorName):
        yield value.name
    elif isinstance(value, Record):
        yield from tensor_names([value.args, value.kwargs, value.state, value.items, value.mapping])
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensor_names(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensor_names(item)


def brief(value: Value, max_characters: int = 60) -> str:
    """A value for people, in one line of at max_characters `max_characters`, and `…` if something is left out.

    The rest of a large value is never visited.

    >>> brief({"betas": (0.9, 0.95), "name": "x" * 100}, 30)
    '{betas: [0.9, 0.95], name: xxx…'
    """
    text = ""
    for part in _text_parts(value, max_characters, 0):
        text += _SPACES.sub(" ", part)
        if len(text) > max_characters:
            return text[:max_characters] + "…"
    return text


_SPACES = re.compile(r"\s+")
_MAX_DEPTH = 6
_MAX_BITS = 2000


def _text_parts(value: Value, max_characters: int, depth: int) -> Iterator[str]:
    """The text of a value in parts, so that the caller can stop early."""
    if depth > _MAX_DEPTH:
        yield "…"
    elif isinstance(value, Record):
        yield f"<{value.cls}> "
        yield from _text_parts(value.state if value.state is not None else value.args, max_characters, depth + 1)
    elif isinstance(value, dict):
        yield from _joined("{", _pairs(value, max_characters, depth), "}")
    elif isinstance(value, (list, tuple)):
        yield from _joined("[", (_text_parts(item, max_characters, depth + 1) for item in value), "]")
    elif isinstance(value, (set, frozenset)):
        yield from _joined("{", (_text_parts(item, max_characters, depth + 1) for item in value), "}")
    elif isinstance(value, str):
        yield value[: max_characters + 1]
    elif isinstance(value, (bytes, bytearray)):
        yield repr(bytes(value[: max_characters + 1]))
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        yield f"an integer of {value.bit_length():,} bits"
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield "an array of objects, dates or rows"
    elif isinstance(value, np.ndarray):
        yield f"an array of shape {list(value.shape)} and type {value.dtype.name}"
    elif isinstance(value, TensorName):
        yield f"tensor {value.name[:max_characters]}"
    elif value is None or isinstance(value, (bool, int, float, complex, Global, np.generic)):
        yield str(value)
    else:
        yield kind_of(value)


def _pairs(value: dict[Value, Value], max_characters: int, depth: int) -> Iterator[Iterator[str]]:
    def pair(key: Value, item: Value) -> Iterator[str]:
        yield from _text_parts(key, max_characters, depth + 1)
        yield ": "
        yield from _text_parts(item, max_characters, depth + 1)

    return (pair(key, item) for key, item in value.items())


def _joined(left: str, items: Iterable[Iterator[str]], right: str) -> Iterator[str]:
    yield left
    for i, item in enumerate(items):
        if i:
            yield ", "
        yield from item
    yield right


def is_natural(value: Any, limit: int = 1 << 62) -> bool:
    """Whether the value is an integer from 0 to `limit`. (JSON's `true` is not.)"""
    return type(value) is int and 0 <= value <= limit
