"""Tensors at the leaves of a tree of values, and names for them."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.claims import MAX_STATE_DEPTH
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value

Leaf: TypeAlias = TensorRef | Tensor
"""A tensor of one file, or one that is assembled from several files."""


def tensor_leaf(leaf: Leaf) -> Tensor:
    """The lazy tensor of a leaf."""
    return leaf if isinstance(leaf, Tensor) else tensor_of(leaf)


def has_tensor(value: Value, *, lists: bool = False) -> bool:
    """Whether a value is a tensor, or contains one in nested dicts (with `lists`: also in lists and tuples).

    Uses an explicit stack, and visits each container once, because a file may nest and share without limit.
    """
    seen, pending = set(), [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Leaf):
            return True
        if isinstance(item, (dict, list, tuple) if lists else dict) and id(item) not in seen:
            seen.add(id(item))
            pending += item.values() if isinstance(item, dict) else item
    return False


def is_extra_state(name: str) -> bool:
    """Whether the name is that of a module's `get_extra_state`. Its value may be a tensor, but is not a weight."""
    return name == "_extra_state" or name.endswith("._extra_state")


def named_leaves(tree: Mapping[Value, Value], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Leaf]]:
    """The tensors with their dotted names. Raises `CorruptError` if dicts are nested too deeply."""
    if depth > MAX_STATE_DEPTH:
        raise CorruptError("dicts are nested too deeply to be a model")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if is_extra_state(name):
            continue
        if isinstance(value, Leaf):
            yield name, value
        elif isinstance(value, dict) and has_tensor(value):
            yield from named_leaves(value, f"{name}.", depth + 1)


def non_tensor_items(tree: Mapping[Value, Value], prefix: str = "") -> Iterator[tuple[str, Value]]:
    """The entries among the tensors that are not tensors, with their dotted names."""
    for key, value in tree.items():
        if is_extra_state(f"{prefix}{key}"):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) and has_tensor(value):
            yield from non_tensor_items(value, f"{prefix}{key}.")
        elif not isinstance(value, Leaf):
            yield f"{prefix}{key}", value


def place(leaf: Leaf) -> tuple[object, ...]:
    """A key for the memory of a leaf's elements. Two names of one tensor have the same key."""
    if isinstance(leaf, TensorRef):
        return (leaf.storage.path, leaf.storage.key, leaf.dtype, leaf.offset, leaf.shape, leaf.strides)
    return (id(leaf),)


def find_ties(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Tied tensors: alias -> the earlier name of the same elements of one storage, or of the same `Tensor`."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, leaf in leaves.items():
        at = place(leaf)
        if leaf.size and first.setdefault(at, name) != name:
            aliases[name] = first[at]
    return aliases
