"""What a run notes, as plain data."""

from typing import Any

import numpy as np
import torch

from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.universal.gradients.noted_tensors import noted_tensor
from ckpt_training.local_shards import dtype_name

OPTIMIZER_ENTRIES = "optimizer_entries"
"""The extra with what the state dicts of the optimizers have besides the states of parameters, by their numbers."""
_PREFIX = "note."
_RESERVED = ("ckpt", "random_states", OPTIMIZER_ENTRIES)


def extra_name(note: str) -> str:
    """The name of the extra that has a note: its own, unless a checkpoint has something else under that."""
    return _PREFIX + note if note in _RESERVED or note.startswith(_PREFIX) else note


def note_name(extra: str) -> str:
    """The name of the note that an extra has."""
    return extra.removeprefix(_PREFIX)


def _values(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor; NumPy itself lacks some types of torch."""
    values, name = tensor.detach().cpu().contiguous(), dtype_name(tensor.dtype)
    if name not in DTYPES:
        raise TypeError(f"note() cannot record a tensor of {tensor.dtype}")
    return values.reshape(-1).view(torch.uint8).numpy().view(DTYPES[name]).reshape(values.shape)


def plain_note(item: Any) -> Any:
    """The item of a note as plain data."""
    if hasattr(item, "state_dict"):
        item = item.state_dict()
    if isinstance(item, torch.Tensor):
        return noted_tensor(_values(item))
    if isinstance(item, dict):
        return {key: plain_note(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return (
            type(item)(plain_note(value) for value in item)
            if type(item) in (list, tuple)
            else list(map(plain_note, item))
        )
    if isinstance(item, (np.ndarray, np.generic, str, int, float, bool, bytes, type(None), complex, set, frozenset)):
        return item
    raise TypeError(
        f"note() takes plain values, tensors, arrays and objects with a state_dict, not {type(item).__name__}"
    )
