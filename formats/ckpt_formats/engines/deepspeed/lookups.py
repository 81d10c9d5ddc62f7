"""Typed look-ups in the values of a file. A file is untrusted input: every entry may be missing or of another type."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import FileBlob, Tensor, is_c_order
from ckpt_formats.core.values import Value, is_natural, kind_of

T = TypeVar("T")


def get(tree: Value, key: Any, kind: type[T], where: Path) -> T:
    """The entry `key` of a mapping or list. Raises `CorruptError` if it is missing or not of type `kind`."""
    try:
        value = tree[key]
    except (KeyError, IndexError, TypeError):
        raise CorruptError(f"the entry {key!r} is missing", where=where, hint=_HINT) from None
    if not isinstance(value, kind):
        raise CorruptError(f"the entry {key!r} is {kind_of(value)}, expected a {kind.__name__}", where=where)
    return value


_HINT = "Is it a file of another engine, or of another version of DeepSpeed?"


def shape_of(value: Value, where: Path) -> Shape:
    """The shape from a `torch.Size`, tuple or list of whole numbers. Raises `CorruptError` if it is none."""
    if not isinstance(value, Sequence) or len(value) > 64 or not all(map(is_natural, value)):
        raise CorruptError(f"not a shape: {str(value)[:60]}", where=where)
    return tuple(value)


def tensor(value: Value, where: Path) -> Tensor:
    """A stored tensor. Raises `CorruptError` if the value is none."""
    if not isinstance(value, TensorRef):
        raise CorruptError(f"expected a tensor, found {kind_of(value)}", where=where)
    return tensor_of(value)


def vector(value: Value, where: Path) -> FileBlob:
    """A stored tensor as a vector, (size,). Raises `UnsupportedError` if it is not contiguous in the file."""
    stored = tensor(value, where)
    blob = stored.fragments[0].blob if stored.fragments else None
    if not isinstance(blob, FileBlob):
        raise UnsupportedError("a flat partition is not stored as the bytes of one tensor", where=where)
    if not is_c_order(blob.shape, blob.strides, blob.dtype.itemsize):
        raise UnsupportedError("a flat partition is stored with gaps", where=where)
    return blob.shaped((stored.size,))


def is_tensor(value: Value) -> bool:
    """Is the value a stored tensor?"""
    return isinstance(value, TensorRef)
