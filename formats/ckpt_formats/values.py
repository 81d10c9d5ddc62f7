"""The non-tensor items of a checkpoint, as inert data.

A value is None, bool, int, float, complex, str, bytes, list, tuple, dict,
set, frozenset, a NumPy array or scalar, or one of the inert stand-ins below
for what a pickle names. Nothing here imports or calls what it names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Value = Any  # a recursive union; mypy gains nothing from spelling it out


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
    """An object of a class that we do not import: what a pickle says of it, no more.

    Mutable, because a pickle builds an object in steps and may refer to it
    before the last of them; frozen in spirit once the file is read.
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
        """An attribute, whether the class keeps them in `__dict__` or in slots."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        for part in parts:
            if isinstance(part, dict) and name in part:
                return part[name]
        return default


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor among the extras: the name of the parameter, of the role `extra`, that holds it."""

    name: str


class Size(tuple[int, ...]):
    """A `torch.Size`: a tuple to whoever reads it, and written back as what it was."""

    __slots__ = ()


class StdDict(dict[Value, Value]):
    """An `OrderedDict`, `defaultdict` or `Counter`: a dict to whoever reads it, and written back as what it was.

    Not the real classes: a `defaultdict` calls its factory, and attributes that
    a hostile file sets on an `OrderedDict` could hide its methods.
    """

    __slots__ = ("attrs", "cls", "factory")

    def __init__(self, cls: Global = Global("collections", "OrderedDict"), factory: Global | None = None) -> None:
        super().__init__()
        self.cls = cls
        self.factory = factory
        self.attrs: dict[str, Value] = {}
        """What was set on the object itself, such as `_metadata` of a module's state dict."""


def tensor_names(value: Value) -> Iterator[str]:
    """The names of all tensors in a value that is a tree, as those that come from JSON are."""
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
