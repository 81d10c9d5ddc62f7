"""Typed look-ups in the records of a pickle: it is input from strangers, and says what it likes."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.values import Global, Record, Value, kind_of

T = TypeVar("T")

_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")


def attribute(record: Value, name: str, kind: type[T], where: Path) -> T:
    """An attribute of an object, of the kind expected. Raises `Corrupt` otherwise."""
    value = record.get(name) if isinstance(record, Record) else None
    if not isinstance(value, kind):
        what = kind_of(record) if not isinstance(record, Record) else f"a {record.cls.name}"
        raise Corrupt(f"`{name}` of {what} is {kind_of(value)}, expected a {kind.__name__}", where=where)
    return value


def numbers(value: Value, what: str, where: Path) -> Shape:
    """Whole numbers from 0 on: a `torch.Size`, tuple or list. Raises `Corrupt` for anything else."""
    if not isinstance(value, (tuple, list)) or len(value) > 64 or not all(map(is_natural, value)):
        raise Corrupt(f"{what} is not a list of whole numbers: {str(value)[:60]}", where=where)
    return tuple(value)


def subclass(value: Value) -> Record | None:
    """What a tensor of a class of its own, maybe a parameter, was saved as; None for anything else."""
    while isinstance(value, Record) and value.cls.module == "torch._utils" and value.cls.name in _PARAMETERS:
        value = value.args[0] if value.args else None
    if not isinstance(value, Record) or value.cls.name not in ("_rebuild_from_type_v2", "_rebuild_from_type"):
        return None
    return value if len(value.args) == 4 and isinstance(value.args[1], Global) else None


def class_of(record: Record) -> str:
    """The class of such a tensor: `DTensor`, `ShardedTensor`."""
    cls: Global = record.args[1]
    return cls.name


def parts(state: Value) -> Iterator[dict[str, Value]]:
    """The attributes of an object, those in `__dict__` and those in slots."""
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield part
