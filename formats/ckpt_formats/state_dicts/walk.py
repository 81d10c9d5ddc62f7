"""Checks of the content of a value: containers and objects of all kinds, at any depth."""

from collections.abc import Iterable
from typing import Any, Literal

from ckpt_formats.containers.torchfile import Storage, StorageSlice, TensorRef
from ckpt_formats.core.claims import MAX_TREE_DEPTH
from ckpt_formats.core.values import Record, Value
from ckpt_formats.state_dicts.leaves import Leaf


def holds_tensor(value: Value) -> bool:
    """Whether a value contains a tensor or a storage at any depth, also in lists and objects."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, (Leaf, Storage, StorageSlice)):
            return True
        if isinstance(item, (dict, list, tuple, set, frozenset, Record)) and id(item) not in seen:
            seen.add(id(item))
            pending += _parts(item)
    return False


def check_contents(value: Value, own: set[int]) -> Literal["fine", "own", "endless"]:
    """`own` if a value contains an object whose id is in `own`, `endless` if it is cyclic or too deep, else `fine`."""
    done: set[int] = set()
    stack: list[tuple[int, Any]] = [(0, iter((value,)))]
    while stack:
        part = next(stack[-1][1], stack)
        if part is stack:
            done.add(stack.pop()[0])
        elif id(part) in own:
            return "own"
        elif len(stack) > MAX_TREE_DEPTH:
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
