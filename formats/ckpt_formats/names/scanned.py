"""Scanned layers of JAX: one tensor has those of all layers, along its second axis; and layers one by one.

`decoder.layers.mlp.wo.kernel` of shape (ffn, layers, hidden) is `decoder.layers_0.mlp.wo.kernel` (ffn, hidden) and so
on, with all states. Source: MaxText, `scan_layers` and `param_scan_axis: 1`.
"""

import re
from collections.abc import Sequence

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.claims import MAX_NUMBER
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.views import permuted, stacked, unstacked_all
from ckpt_formats.names.renames import TensorRename, apply_renames

_SCANNED = re.compile(r"(decoder\.layers)\.(.+)")
_LAYER = re.compile(r"(decoder\.layers)_(\d{1,6})\.(.+)")


def one_by_one(source: Checkpoint) -> Checkpoint:
    """The checkpoint with scanned layers one by one, lazily.

    Raises `CorruptError` for a tensor without such an axis.
    """
    changes = []
    for name, parameter in source.parameters.items():
        match = _SCANNED.fullmatch(name)
        if match is None or parameter.role == "extra":
            continue
        shape = parameter.weight.shape
        if len(shape) < 2 or not 0 < shape[1] <= MAX_NUMBER:
            raise CorruptError(f"`{printable(name)}` of shape {list(shape)} has no axis of layers", where=source.path)
        new = tuple(f"{match[1]}_{layer}.{match[2]}" for layer in range(shape[1]))
        changes.append(TensorRename((name,), new, _cut))
    return apply_renames(source, changes) if changes else source


def scanned(source: Checkpoint) -> Checkpoint:
    """The checkpoint with the layers joined, lazily."""
    members: dict[str, dict[int, str]] = {}
    for name, parameter in source.parameters.items():
        if (match := _LAYER.fullmatch(name)) and parameter.role != "extra":
            members.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
    changes = [
        TensorRename(tuple(layers[layer] for layer in sorted(layers)), (name,), _join)
        for name, layers in members.items()
    ]
    return apply_renames(source, changes) if changes else source


def _cut(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (tensor,) = tensors
    return tuple(unstacked_all(_swapped(tensor)))


def _join(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (_swapped(stacked(tensors)),)


def _swapped(tensor: Tensor) -> Tensor:
    """The tensor with its first two axes swapped."""
    return permuted(tensor, (1, 0, *range(2, len(tensor.shape))))
