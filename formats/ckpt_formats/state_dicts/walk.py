"""What lies inside a value, in containers and objects of all kinds, however deeply a file nests them."""

from collections.abc import Iterable
from typing import Any, Literal

from ckpt_formats.containers.torchfile import Storage, StorageSlice, TensorRef
from ckpt_formats.core.values import Record, Value
from ckpt_formats.state_dicts.leaves import Leaf

MAX_DEPTH = 100
"""Containers in each other, in what is carried."""


def holds_tensor(value: Value) -> bool:
    """Anywhere in it, also in lists and objects."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (Leaf, Storage, StorageSlice)):
            return True
        if isinstance(one, (dict, list, tuple, set, frozenset, Record)) and id(one) not in seen:
            seen.add(id(one))
            waiting += _parts(one)
    return False


def check_contents(value: Value, own: set[int]) -> Literal["fine", "own", "endless"]:
    """Is something in it that is `own`, or that holds itself or is nested too deeply?"""
    done: set[int] = set()
    stack: list[tuple[int, Any]] = [(0, iter((value,)))]
    while stack:
        part = next(stack[-1][1], stack)
        if part is stack:
            done.add(stack.pop()[0])
        elif id(part) in own:
            return "own"
        elif len(stack) > MAX_DEPTH:
            return "endless"
        elif id(part) not in done and isinstance(part, (dict, list, tuple, set, frozenset, Record, TensorRef)):
            stack.append((id(part), iter(_parts(part))))
    return "fine"


def _parts(value: Value) -> Iterable[Value]:
    if isinstance(value, Record):
        return [value.args, value.kwargs, value.state, value.items, value.mapping]
    if isinstance(value, TensorRef):
        return [value.attrs]
    if isinstance(value, dict):
        return [*value, *value.values(), getattr(value, "attrs", None)]
    parts: Iterable[Value] = value
    return parts
