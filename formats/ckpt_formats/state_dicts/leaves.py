"""Tensors at the leaves of a tree of values, and names for them."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ckpt_formats.containers.torchfile import TensorRef, tensor_of
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value

Leaf: TypeAlias = TensorRef | Tensor
"""A tensor of one file, or one that was put together from several."""

_MAX_DEPTH = 50


def tensor_leaf(leaf: Leaf) -> Tensor:
    """The lazy tensor that a leaf stands for."""
    return leaf if isinstance(leaf, Tensor) else tensor_of(leaf)


def has_tensor(value: Value, *, lists: bool = False) -> bool:
    """In it or in dicts (and `lists`) in it. On a stack of our own, each once: a file may nest and share at will."""
    seen, waiting = set(), [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Leaf):
            return True
        if isinstance(one, (dict, list, tuple) if lists else dict) and id(one) not in seen:
            seen.add(id(one))
            waiting += one.values() if isinstance(one, dict) else one
    return False


def is_extra_state(name: str) -> bool:
    """Is it what `get_extra_state` of a module gave? That may be a tensor, and is no weight."""
    return name == "_extra_state" or name.endswith("._extra_state")


def named_leaves(tree: Mapping[Value, Value], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Leaf]]:
    """Tensors by dotted names. Raises `Corrupt` if they are nested without end."""
    if depth > _MAX_DEPTH:
        raise Corrupt("dicts are nested too deeply to be a model")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if is_extra_state(name):
            continue
        if isinstance(value, Leaf):
            yield name, value
        elif isinstance(value, dict) and has_tensor(value):
            yield from named_leaves(value, f"{name}.", depth + 1)


def non_tensor_items(tree: Mapping[Value, Value], prefix: str = "") -> Iterator[tuple[str, Value]]:
    """What lies between the tensors and is none."""
    for key, value in tree.items():
        if is_extra_state(f"{prefix}{key}"):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) and has_tensor(value):
            yield from non_tensor_items(value, f"{prefix}{key}.")
        elif not isinstance(value, Leaf):
            yield f"{prefix}{key}", value


def place(leaf: Leaf) -> tuple[object, ...]:
    """Where its elements lie: the same of two names for one tensor."""
    if isinstance(leaf, TensorRef):
        return (leaf.storage.path, leaf.storage.key, leaf.dtype, leaf.offset, leaf.shape, leaf.strides)
    return (id(leaf),)


def find_ties(found: Mapping[str, Leaf]) -> dict[str, str]:
    """Names of the same elements of one storage, or of the same `Tensor`, as an earlier name."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, leaf in found.items():
        at = place(leaf)
        if leaf.size and first.setdefault(at, name) != name:
            aliases[name] = first[at]
    return aliases
