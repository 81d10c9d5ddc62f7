"""Notices that name values with tensors which did not become weights."""

from collections.abc import Mapping

import numpy as np

from ckpt_formats.containers.torchfile import Storage, StorageSlice
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import Record, Value
from ckpt_formats.state_dicts.leaves import Leaf, is_extra_state, non_tensor_items
from ckpt_formats.state_dicts.tensor_parts import OBJECT
from ckpt_formats.state_dicts.walk import holds_tensor

_OBJECT = f".{OBJECT}"


def not_weights(model: Mapping[Value, Value], rest: Mapping[str, Value]) -> tuple[Notice, ...]:
    """Notices about entries of the model's dict, and of `rest`, that contain tensors but are not weights.

    `rest` is empty if the model has its own dict: then that dict should contain only tensors.
    """
    among_tensors = [
        (key, value) for key, value in non_tensor_items(model) if not is_extra_state(key) and not key.endswith(_OBJECT)
    ]
    holders = (Record, Storage, StorageSlice) if rest else (Record, Storage, StorageSlice, np.ndarray)
    unread = [(key, value) for key, value in among_tensors if isinstance(value, holders) or holds_tensor(value)]
    unread += [
        (key, value)
        for key, value in rest.items()
        if isinstance(value, (Storage, StorageSlice)) or _has_tensors_inside(value)
    ]
    return tuple(
        Notice(text, names, Weight.LOST)
        for text, names in (
            (
                "contains tensors in an unknown form; carried as extras, not as weights",
                tuple(f"{key} ({_kind(value)})" for key, value in unread),
            ),
        )
        if names
    )


def _has_tensors_inside(value: Value) -> bool:
    """Whether a value is a list with tensors as items, or an object with tensors anywhere in it."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, Leaf) for item in value)
    return isinstance(value, Record) and holds_tensor(value)


def _kind(value: Value) -> str:
    if isinstance(value, Record):
        return value.cls.qualname
    return "NumPy" if isinstance(value, np.ndarray) else type(value).__name__.lower()
