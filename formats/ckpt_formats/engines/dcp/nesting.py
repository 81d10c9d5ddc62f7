"""Flatten and nest state dicts as `torch.distributed.checkpoint` does.

A value's name is its path joined by dots. It cannot be split again, because keys
contain dots, too. So each name is stored with its path, whose steps are
strings for keys of a dict and numbers for indices of a list.

Source: torch/distributed/checkpoint/_nested_dict.py, _traverse.py.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_formats.core.claims import MAX_NUMBER, MAX_TREE_DEPTH
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.metadata import Steps


class _Node(dict[str | int, Value]):
    """A dict or list of the state dict under construction. Plain dicts are values and are not changed."""


def nested(values: Mapping[str, Value], paths: Mapping[str, Steps], where: Path) -> dict[str, Value]:
    """The state dict with these values at these paths. Raises `CorruptError` if two paths contradict each other."""
    root = _Node()
    for name, value in values.items():
        *parents, last = paths[name]
        node: Value = root
        for step in parents:
            if step not in node:
                node[step] = _Node()
            node = node[step]
            if type(node) is not _Node:
                break
        if type(node) is not _Node or last in node or len(parents) > MAX_TREE_DEPTH:
            raise CorruptError(
                f"`{printable(name)}` and another value have the same place in the state dict", where=where
            )
        node[last] = value
    tree = _plain(root, where)
    if not isinstance(tree, dict):
        raise CorruptError("the state dict is a list", where=where)
    return tree


def flattened(tree: Mapping[str, Value]) -> Iterator[tuple[str, Steps, Value]]:
    """Every leaf of a state dict as (name, path, leaf). A leaf is a tensor or a value that becomes one item.

    Dicts are never leaves, tuples always. Lists are leaves if they contain neither tensors nor dicts.
    Raises `UnsupportedError` if two leaves get the same name.
    """
    seen: set[str] = set()
    for key, value in tree.items():
        for path, leaf in _leaves((str(key),), value):
            name = ".".join(map(str, path))
            if name in seen:
                raise UnsupportedError(
                    f"two values of the state dict would both be called `{printable(name)}`",
                    hint="Keys with dots clash with nested ones: choose other --keys.",
                )
            seen.add(name)
            yield name, path, leaf


def _plain(node: Value, where: Path) -> Value:
    if type(node) is not _Node:
        return node
    plain = {step: _plain(value, where) if type(value) is _Node else value for step, value in node.items()}
    kinds = set(map(type, plain))
    if kinds != {int}:
        if int in kinds:
            raise CorruptError("the state dict has a place that is both a dict and a list", where=where)
        return plain
    if min(map(int, plain)) < 0 or max(map(int, plain)) > MAX_NUMBER:
        raise CorruptError("the state dict has a list with impossible places", where=where)
    # Empty values, such as an empty dict, were not saved. Torch puts None there.
    return [plain.get(place) for place in range(max(map(int, plain)) + 1)]


def _leaves(path: Steps, value: Value) -> Iterator[tuple[Steps, Value]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)
    elif _is_leaf(value):
        yield path, value
    else:
        for place, item in enumerate(value):
            yield from _leaves((*path, place), item)


def _is_leaf(value: Value) -> bool:
    if type(value) is not list:
        return not isinstance(value, dict)
    return all(not isinstance(item, Tensor) and _is_leaf(item) for item in value)
