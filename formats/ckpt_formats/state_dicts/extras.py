"""Values that contain tensors: from a PyTorch file to the extras of a checkpoint, and back.

Of several ranks, the extras are those of the first rank, and under `ranks` what differs in others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count

import numpy as np

from ckpt_formats.containers.torchfile import CompactRecord, Storage, StorageSlice, TensorRef, tensor_of
from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.checkpoint import MODEL, Parameter
from ckpt_formats.core.claims import MAX_DEPTH
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.values import Global, Record, Size, StdDict, TensorName, Value, brief, opaque

_MAX_SHOWN = 40
_ATOMS = frozenset((bool, int, float, str, bytes, type(None)))
"""Types that contain nothing; most values of a parameter have one of them."""
_PLAIN_KEYS = (str, int, float, bytes, complex, type(None), Global, np.generic, CompactRecord, TensorName)
_TEXT = frozenset((str,))
_LEAVES = {str, int, float, bool, type(None), TensorRef, TensorName, Tensor}
"""The types of most leaves."""


def names_for_tensors(value: Value, name: str, parameters: dict[str, Parameter]) -> Value:
    """The value with a `TensorName` in the place of every tensor.

    Adds the tensors to `parameters`, with the role `extra`. `name` is the place of the
    value, such as `lr_scheduler`; a tensor is named by its place, such as `rng/cpu`. A tensor
    in several places becomes one parameter. Raises `UnsafeError` for a value that is nested too deeply.
    """
    if type(value) in _ATOMS:
        return value
    return _Visitor(_Extraction(parameters)).walk(value, name, 0)


def tensors_for_names(value: Value, parameters: Mapping[str, Parameter]) -> Value:
    """The value with tensors in the places of their names: the inverse of `names_for_tensors`."""

    def leaf(item: Value, name: str) -> Value:
        return parameters[item.name].states[MODEL] if isinstance(item, TensorName) else item

    return _Visitor(leaf).walk(value, "", 0)


def map_leaves(value: Value, leaf: Callable[[Value], Value]) -> Value:
    """The value with `leaf(item)` in the place of every item that is not a container."""
    return _Visitor(lambda item, name: leaf(item), leaf).walk(value, "", 0)


def map_leaves_by_name(value: Value, name: str, leaf: Callable[[Value, str], Value]) -> Value:
    """The same, but `leaf` also gets the place: `name`, then keys and numbers, joined by slashes."""
    return _Visitor(leaf).walk(value, name, 0)


def differing_items(items: Mapping[str, Value], first: Mapping[str, Value]) -> dict[str, Value]:
    """Return the items of a rank that the first rank lacks, or that have another value there."""
    return {key: value for key, value in items.items() if key not in first or not same(value, first[key])}


def extras_of_ranks(
    ranks: Iterable[tuple[str, Mapping[str, Value]]],
    parameters: dict[str, Parameter],
    section: str = "",
    by_entry: bool = False,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """Return the extras of the first rank, and for each other rank, by its label, those that differ: maybe none.

    `ranks` are labels with items. `section` precedes the keys in the names of tensors, which are added to
    `parameters`. `by_entry`: of arguments and mappings, only the entries that differ are returned.
    """
    every = list(ranks)
    first = every[0][1] if every else {}
    extras = {key: names_for_tensors(value, f"{section}{key}", parameters) for key, value in first.items()}
    others: dict[str, dict[str, Value]] = {}
    for label, items in every[1:]:
        others[label] = {}
        for key, value in differing_items(items, first).items():
            own = _entries(value, first[key]) if by_entry and key in first else value
            others[label][key] = names_for_tensors(own, f"ranks/{label}/{section}{key}", parameters)
    return extras, others


def with_ranks(extras: Mapping[str, Value], others: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Return the extras with those of other ranks under `ranks`. Ranks without items are left out."""
    present = {label: items for label, items in others.items() if items}
    return {**extras, "ranks": present} if present else dict(extras)


class _Extraction:
    def __init__(self, parameters: dict[str, Parameter]) -> None:
        self._parameters = parameters
        self._names: dict[int, tuple[Value, str]] = {}

    def __call__(self, value: Value, name: str) -> Value:
        if not isinstance(value, (TensorRef, Tensor, Storage, StorageSlice)):
            return value
        if id(value) not in self._names:
            free = next(n for n in candidate_names(name) if n not in self._parameters)
            self._parameters[free] = Parameter(free, "extra", {MODEL: _tensor(value)})
            self._names[id(value)] = (value, free)  # the reference keeps the value alive, so that its id stays unique
        return TensorName(self._names[id(value)][1])


class _Visitor:
    """Rebuilds a tree of values. A value that several places share is rebuilt once and shared again."""

    def __init__(self, leaf: Callable[[Value, str], Value], unnamed: Callable[[Value], Value] | None = None) -> None:
        """`unnamed`: the same as `leaf`, if the places of leaves are not needed. A tree may have a million leaves."""
        self._leaf = leaf
        self._unnamed = unnamed
        self._done: dict[int, tuple[Value, Value]] = {}

    def walk(self, value: Value, name: str, depth: int) -> Value:
        if id(value) in self._done:
            return self._done[id(value)][1]
        if depth > MAX_DEPTH:
            raise UnsafeError(f"the value at `{name[:80]}` contains itself, or is nested too deeply")
        result = self._rebuild(value, name, depth + 1)
        if result is not value:
            self._done[id(value)] = (value, result)
        return result

    def _rebuild(self, value: Value, name: str, depth: int) -> Value:
        leaf = self._unnamed
        if leaf is not None and type(value) is dict and _TEXT.issuperset(map(type, value)):
            return {
                key: leaf(item) if type(item) in _LEAVES else self.walk(item, f"{name}/{key}", depth)
                for key, item in value.items()
            }

        def inner(item: Value, key: Value) -> Value:
            if leaf is not None and type(item) in _LEAVES:
                return leaf(item)
            return self.walk(item, f"{name}/{key}", depth)

        if isinstance(value, StdDict):
            result = StdDict(value.cls, value.factory)
            result.update(self._pairs(value.items(), inner))
            result.attrs = inner(value.attrs, "attrs")
            return result
        if isinstance(value, dict):
            return dict(self._pairs(value.items(), inner))
        if type(value) is list:
            return [inner(item, i) for i, item in enumerate(value)]
        if type(value) is tuple:
            return tuple(inner(item, i) for i, item in enumerate(value))
        if isinstance(value, Record):
            return Record(
                value.cls,
                tuple(inner(item, i) for i, item in enumerate(value.args)),
                {key: inner(item, key) for key, item in value.kwargs.items()},
                inner(value.state, "state") if value.state is not None else None,
                [inner(item, i) for i, item in enumerate(value.items)],
                list(self._pairs(value.mapping, inner)),
                value.new,
            )
        if isinstance(value, (set, frozenset)) and not all(isinstance(item, _PLAIN_KEYS) for item in value):
            return type(value)(inner(item, "item") for item in value)
        if (record := opaque(value)) is not None:
            return inner(record, "array")
        return value if isinstance(value, Size) else self._leaf(value, name)

    def _pairs(
        self, pairs: Iterable[tuple[Value, Value]], inner: Callable[[Value, Value], Value]
    ) -> Iterator[tuple[Value, Value]]:
        """The pairs, rebuilt. Keys are rebuilt too, because a key may be a tensor."""
        for key, item in pairs:
            if isinstance(key, _PLAIN_KEYS):
                yield key, inner(item, key)
            else:
                shown = brief(key, _MAX_SHOWN)
                yield inner(key, f"{shown} (key)"), inner(item, shown)


def _entries(value: Value, first: Value) -> Value:
    """The entries of a value that differ from the first rank's, if both are arguments or mappings."""
    if isinstance(value, Record) and isinstance(first, Record) and value.cls == first.cls:
        namespaces = isinstance(value.state, dict) and isinstance(first.state, dict)
        return Record(value.cls, state=_entries(value.state, first.state)) if namespaces else value
    if isinstance(value, dict) and isinstance(first, dict):
        return differing_items(value, first)
    return value


def _tensor(value: TensorRef | Tensor | Storage | StorageSlice) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, TensorRef):
        return tensor_of(value)
    storage, start, numel = (
        (value, 0, value.numel) if isinstance(value, Storage) else (value.storage, value.start, value.numel)
    )
    offset = storage.offset + start * storage.itemsize
    if storage.dtype is None:  # NumPy lacks the type: the bytes as they are stored
        return Tensor.of(
            FileBlob.packed(storage.path, offset, (numel * storage.itemsize,), DTYPES["uint8"], storage.seal)
        )
    return Tensor.of(FileBlob.packed(storage.path, offset, (numel,), storage.dtype, storage.seal))


def candidate_names(name: str) -> Iterator[str]:
    """The name, then the name with numbers: `name`, `name~1`, `name~2`, ... The caller takes the first free one."""
    yield name
    yield from (f"{name}~{i}" for i in count(1))
