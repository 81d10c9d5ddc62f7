"""Typed look-ups in what a file holds: it is input from strangers, and says what it likes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import Corrupt, Unsupported
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import FileBlob, Tensor, is_c_order
from ckpt_formats.core.values import Value, kind_of

T = TypeVar("T")


def get(tree: Value, key: Any, kind: type[T], where: Path) -> T:
    """An entry of a mapping or list, of the kind expected. Raises `Corrupt` otherwise."""
    try:
        value = tree[key]
    except (KeyError, IndexError, TypeError):
        raise Corrupt(f"the entry {key!r} is missing", where=where, hint=_HINT) from None
    if not isinstance(value, kind):
        raise Corrupt(f"the entry {key!r} is {kind_of(value)}, expected a {kind.__name__}", where=where)
    return value


_HINT = "Is it a file of another engine, or of another version of DeepSpeed?"


def shape_of(value: Value, where: Path) -> Shape:
    """A `torch.Size`, tuple or list of whole numbers."""
    if not isinstance(value, Sequence) or len(value) > 64 or not all(map(is_natural, value)):
        raise Corrupt(f"not a shape: {str(value)[:60]}", where=where)
    return tuple(value)


def tensor(value: Value, where: Path) -> Tensor:
    """A stored tensor."""
    if not isinstance(value, TensorRef):
        raise Corrupt(f"expected a tensor, found {kind_of(value)}", where=where)
    return tensor_of(value)


def vector(value: Value, where: Path) -> FileBlob:
    """A stored tensor as a flat vector. Raises `Unsupported` if it is not packed."""
    stored = tensor(value, where)
    blob = stored.fragments[0].blob if stored.fragments else None
    if not isinstance(blob, FileBlob):
        raise Unsupported("a flat partition is not plainly stored", where=where)
    if not is_c_order(blob.shape, blob.strides, blob.dtype.itemsize):
        raise Unsupported("a flat partition is stored with gaps", where=where)
    return blob.shaped((stored.size,))


def is_tensor(value: Value) -> bool:
    return isinstance(value, TensorRef)
