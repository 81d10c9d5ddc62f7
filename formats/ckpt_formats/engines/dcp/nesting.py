"""State dicts flattened and nested again, as `torch.distributed.checkpoint` does it.

A value's name is its path joined by dots, and cannot be taken apart again: keys
have dots of their own. So each name is kept with its path, whose steps are
texts for keys of a dict and numbers for places in a list.

Source: torch/distributed/checkpoint/_nested_dict.py, _traverse.py.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_formats.core.errors import Corrupt, Unsupported
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.metadata import Steps

_MOST_DEPTH = 100
_MOST_PLACES = 1 << 20


class _Node(dict[str | int, Value]):
    """A dict or list of the state dict in the making. Values may be dicts, too, and are left alone."""


def nested(values: Mapping[str, Value], paths: Mapping[str, Steps], where: Path) -> dict[str, Value]:
    """The state dict whose values lie at these paths. Raises `Corrupt` if two of them contradict each other."""
    root = _Node()
    for name, value in values.items():
        *before, last = paths[name]
        node: Value = root
        for step in before:
            node = node.setdefault(step, _Node())
            if type(node) is not _Node:
                break
        if type(node) is not _Node or last in node or len(before) > _MOST_DEPTH:
            raise Corrupt(f"`{printable(name)}` is at a place of the state dict that something else has", where=where)
        node[last] = value
    made = _plain(root, where)
    if not isinstance(made, dict):
        raise Corrupt("the state dict is a list", where=where)
    return made


def flattened(tree: Mapping[str, Value]) -> Iterator[tuple[str, Steps, Value]]:
    """Every leaf of a state dict with its name and path: tensors, and values that become one item each.

    Dicts are always taken apart, lists only if there are tensors or dicts in
    them, tuples never. Raises `Unsupported` if two leaves get the same name.
    """
    seen: set[str] = set()
    for key, value in tree.items():
        for path, leaf in _leaves((str(key),), value):
            name = ".".join(map(str, path))
            if name in seen:
                raise Unsupported(
                    f"two values of the state dict would both be called `{printable(name)}`",
                    hint="Keys with dots clash with nested ones: choose other --keys.",
                )
            seen.add(name)
            yield name, path, leaf


def _plain(node: Value, where: Path) -> Value:
    if type(node) is not _Node:
        return node
    made = {step: _plain(value, where) for step, value in node.items()}
    kinds = set(map(type, made))
    if kinds != {int}:
        if int in kinds:
            raise Corrupt("the state dict has a place that is both a dict and a list", where=where)
        return made
    if min(map(int, made)) < 0 or max(map(int, made)) > _MOST_PLACES:
        raise Corrupt("the state dict has a list with impossible places", where=where)
    # What held nothing, such as an empty dict, was not saved: torch has None there.
    return [made.get(place) for place in range(max(map(int, made)) + 1)]


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
