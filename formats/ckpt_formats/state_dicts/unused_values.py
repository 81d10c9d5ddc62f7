"""What lies among a model's tensors, or beside them, and did not become a weight: each is named."""

from collections.abc import Mapping

import numpy as np

from ckpt_formats.containers.torchfile import Storage, StorageSlice
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import Record, Value
from ckpt_formats.state_dicts.leaves import Leaf, is_extra_state, non_tensor_items
from ckpt_formats.state_dicts.tensor_parts import OBJECT
from ckpt_formats.state_dicts.walk import holds_tensor

_OBJECT = f".{OBJECT}"
_MIN_FILE = 16


def not_weights(model: Mapping[Value, Value], rest: Mapping[str, Value]) -> tuple[Notice, ...]:
    """What is said of entries of the model's dict, and of those beside it, that hold tensors and are no weights.

    `rest` is empty where the model has a dict of its own: then nothing but tensors should be in that.
    """
    inside = [
        (key, value) for key, value in non_tensor_items(model) if not is_extra_state(key) and not key.endswith(_OBJECT)
    ]
    odd = (Record, Storage, StorageSlice) if rest else (Record, Storage, StorageSlice, np.ndarray)
    lost = [(key, value) for key, value in inside if isinstance(value, odd) or holds_tensor(value)]
    lost += [
        (key, value) for key, value in rest.items() if isinstance(value, (Storage, StorageSlice)) or _is_holder(value)
    ]
    files = [key for key, value in (*inside, *rest.items()) if _is_file(value)]
    return tuple(
        Notice(text, names, Weight.LOST)
        for text, names in (
            (
                "holds tensors in a form that is not understood; carried as extras, not as weights",
                tuple(f"{key} ({_kind(value)})" for key, value in lost),
            ),
            ("holds the bytes of a file, which is not read; carried as extras", tuple(files)),
        )
        if names
    )


def _is_holder(value: Value) -> bool:
    """Is it an object or a list with tensors right in it?"""
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, Leaf) for item in value)
    return isinstance(value, Record) and holds_tensor(value)


def _kind(value: Value) -> str:
    if isinstance(value, Record):
        return value.cls.qualname
    return "NumPy" if isinstance(value, np.ndarray) else type(value).__name__.lower()


def _is_file(value: Value) -> bool:
    """Are they the bytes of an archive or of a pickle, as they are or in an `io.BytesIO`?"""
    if isinstance(value, Record) and value.cls.name == "BytesIO":
        parts = value.state if isinstance(value.state, tuple) else value.args
        value = parts[0] if parts else None
    if not isinstance(value, (bytes, bytearray)) or len(value) < _MIN_FILE:
        return False
    return bytes(value[:4]) == b"PK\3\4" or (value[0] == 0x80 and value[1] <= 5 and value[-1:] == b".")
