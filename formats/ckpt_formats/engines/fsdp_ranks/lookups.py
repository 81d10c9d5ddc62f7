"""Typed look-ups in the records of a pickle. A pickle is untrusted input: entries may be missing or of another type."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.values import Global, Record, Value, is_natural, kind_of

T = TypeVar("T")

FLAT = "_flat_param"
"""The last part of the name of a flat parameter of FSDP1."""
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")


def attribute(record: Value, name: str, kind: type[T], where: Path) -> T:
    """The attribute `name` of an object. Raises `CorruptError` if it is missing or not of type `kind`."""
    value = record.get(name) if isinstance(record, Record) else None
    if not isinstance(value, kind):
        owner = kind_of(record) if not isinstance(record, Record) else f"a {record.cls.name}"
        raise CorruptError(f"`{name}` of {owner} is {kind_of(value)}, expected a {kind.__name__}", where=where)
    return value


def numbers(value: Value, description: str, where: Path) -> Shape:
    """The numbers of a `torch.Size`, tuple or list. Raises `CorruptError` if they are not whole numbers from 0 on."""
    if not isinstance(value, (tuple, list)) or len(value) > 64 or not all(map(is_natural, value)):
        raise CorruptError(f"{description} is not a list of whole numbers: {str(value)[:60]}", where=where)
    return tuple(value)


def subclass(value: Value) -> Record | None:
    """The record of a tensor of a subclass, which may be in a parameter; None for other values."""
    while isinstance(value, Record) and value.cls.module == "torch._utils" and value.cls.name in _PARAMETERS:
        value = value.args[0] if value.args else None
    if not isinstance(value, Record) or value.cls.name not in ("_rebuild_from_type_v2", "_rebuild_from_type"):
        return None
    return value if len(value.args) == 4 and isinstance(value.args[1], Global) else None


def class_of(record: Record) -> str:
    """The name of the class of a tensor from `subclass`, such as `DTensor` or `ShardedTensor`."""
    cls: Global = record.args[1]
    return cls.name


def parts(state: Value) -> Iterator[dict[str, Value]]:
    """The attributes of an object: the dict from `__dict__` and the dict from slots."""
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield part
