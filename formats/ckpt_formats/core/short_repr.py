"""The `repr` of dataclasses that may hold thousands of things: a line, whatever is in them."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import MISSING, fields
from pathlib import PurePath
from typing import Any

MAX_LENGTH = 200
_MAX_VALUE = 48
_MAX_ITEMS = 8


class ShortRepr:
    """The base of dataclasses whose `repr` is a line, also of classes that are derived from them."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            setattr(cls, "__repr__", short_repr)  # noqa: B010  # `dataclass` writes none where there is one


def short_repr(one: Any) -> str:
    """The class and its fields, but not those that have their defaults. Many items are given as their number.

    A class takes it as its method: `__repr__ = short_repr`.
    """
    shown = (field for field in fields(one) if field.repr and not _is_default(field, getattr(one, field.name)))
    text = ", ".join(f"{field.name}={_short(getattr(one, field.name))}" for field in shown)
    return cut(f"{type(one).__name__}({text})", MAX_LENGTH)


def _is_default(field: Any, value: Any) -> bool:
    if field.default is not MISSING:
        return value is field.default or (type(value) is type(field.default) and bool(value == field.default))
    return field.default_factory is not MISSING and isinstance(value, (Mapping, Sequence)) and not value


def _short(value: Any) -> str:
    if isinstance(value, PurePath):
        return _short(str(value))
    if isinstance(value, (Mapping, Sequence, Set)) and not isinstance(value, (str, bytes)):
        plain = all(isinstance(item, (str, int, float, type(None))) for item in _first(value))
        if len(value) > _MAX_ITEMS or isinstance(value, Mapping) or not plain:
            return f"<{len(value):,} item{'s' * (len(value) != 1)}>"
    if hasattr(value, "__dataclass_fields__"):
        return f"<{type(value).__name__}>"
    return cut(repr(value), _MAX_VALUE)


def _first(value: Any) -> list[Any]:
    return list(value) if len(value) <= _MAX_ITEMS else []


def cut(text: str, most: int) -> str:
    """The text, or its beginning and `…`: at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
