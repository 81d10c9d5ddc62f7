"""A tree with pickled objects, as the equivalent tree of state dicts.

    a module                   its state dict
    an optimizer               its state dict, with parameters by name if the file contains them with a name
    a composite tensor         a dict of plain tensors: `tensor_parts`
    a list at the top level    a dict by number

What state dicts omit, such as hyper-parameters of a module or attributes of a tensor, becomes extras.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_formats.containers.torchfile import TensorRef
from ckpt_formats.core.claims import MAX_TREE_DEPTH
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, StdDict, Value, kind_of
from ckpt_formats.state_dicts.extras import candidate_names
from ckpt_formats.state_dicts.leaves import named_leaves, place
from ckpt_formats.state_dicts.model import find_model
from ckpt_formats.state_dicts.modules import Module, is_module, read_module
from ckpt_formats.state_dicts.optimizer_form import optimizers_in, without_optimizers
from ckpt_formats.state_dicts.pickled_optimizer import PickledOptimizer, is_pickled_optimizer
from ckpt_formats.state_dicts.plain_values import plain_value, tensordict_parts
from ckpt_formats.state_dicts.tensor_parts import OBJECT, HasNoData, array_tensor, class_of, is_tensor, tensor_parts
from ckpt_formats.state_dicts.walk import check_contents, holds_tensor

OBJECTS = "objects"
"""The extra with what objects have in addition to tensors."""
ATTRIBUTES = "attributes"
"""The extra with attributes of tensors and dicts, by their places."""
_NON_PERSISTENT = "_buffers"
"""The attribute with the buffers that a module does not save."""
_ATOMS = frozenset((bool, int, float, str, bytes, type(None)))
"""Types that contain nothing; most values of a file have one of them."""

_TENSORS = frozenset((TensorRef, Tensor))


@dataclass(frozen=True)
class OpenedObjects:
    """A tree in which state dicts replace the objects with weights."""

    root: dict[str, Value]
    extras: dict[str, Value]
    """What the objects contain in addition to weights."""
    notices: tuple[Notice, ...]


def as_root(value: Value) -> tuple[dict[Value, Value], tuple[Notice, ...]]:
    """The content of a file as a dict, and a notice if it is not a dict."""
    if isinstance(value, dict):
        return value, ()
    if isinstance(value, (list, tuple)):
        notice = Notice(f"the file is {kind_of(value)}, not a dict: the keys are the numbers of its items")
        return {str(i): item for i, item in enumerate(value)}, (notice,)
    if is_module(value):
        return {"model": value}, ()
    if is_pickled_optimizer(value):
        return {"optimizer": value}, ()
    if (parts := tensordict_parts(value)) is not None:
        return parts[0], (Notice("the file is a TensorDict, read as a dict of tensors"),)
    if isinstance(value, Record) and isinstance(value.state, dict) and not is_tensor(value):
        notice = Notice(f"the file is an object of class {value.cls}: its attributes are read as the entries of a dict")
        return value.state, (notice,)
    return {"value": value}, ()


def open_objects(root: Mapping[str, Value], where: str) -> OpenedObjects:
    """The tree with a state dict in the place of every object. A tree without objects stays the same.

    Raises `IncompleteError` for tensors without values.
    """
    opening = _Opening(where)
    opened_root: dict[str, Value] = opening.value(dict(root), "", 0)
    if opening.empty:
        raise IncompleteError(
            f"has no data for {len(opening.empty)} of its tensors, such as `{opening.empty[0]}`: they were on the "
            "device `meta`, or had no shape yet",
            where=where,
            hint="Load the model with its weights (to_empty() and load_state_dict()), and save it again.",
        )
    if not opening.tensors and opening.arrays:
        opened_root = _arrays_as_tensors(opened_root, 0)
        opening.notices.append(Notice("the NumPy arrays of the file are read as its tensors", (), Weight.UNSURE))
    opening.place_optimizers(opened_root)
    names = _names_by_place(opened_root) if opening.optimizers else {}
    for one in opening.optimizers:
        unnamed = one.fill(names, lambda value, path: opening.value(value, path, 1), where)
        if unnamed:
            opening.objects[f"{one.path}.params"] = unnamed
    extra_values = {OBJECTS: opening.objects, ATTRIBUTES: opening.attributes}
    extras = {
        next(free for free in candidate_names(key) if free not in opened_root): extra
        for key, extra in extra_values.items()
        if extra
    }
    return OpenedObjects(opened_root, extras, tuple(opening.iter_notices()))


def attributes_of(root: Value) -> dict[str, Value]:
    """The attributes of the dict at the top level, as an extra; empty if they are the usual ones."""
    if (parts := tensordict_parts(root)) is not None:
        return {ATTRIBUTES: parts[1]}
    return {ATTRIBUTES: root.attrs} if isinstance(root, StdDict) and not _is_usual(root.attrs) else {}


class _Opening:
    """One pass over a tree."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._done: dict[int, tuple[Value, Value]] = {}
        self._modules: dict[str, str] = {}
        self._composite_tensors: dict[str, str] = {}
        self._set_tensors: list[str] = []
        self._self_references: list[str] = []
        self._plain: dict[str, str] = {}
        self._tensordicts: list[str] = []
        self._cyclic: list[str] = []
        self.optimizers: list[PickledOptimizer] = []
        self.objects: dict[str, Value] = {}
        self.attributes: dict[str, Value] = {}
        self.empty: list[str] = []
        self.tensors = self.arrays = False
        self.notices: list[Notice] = []

    def value(self, value: Value, path: str, depth: int) -> Value:
        """The value with a state dict in the place of every object. A value inside itself stays unchanged there."""
        if isinstance(value, (TensorRef, Tensor)):
            self.tensors = True
            if type(value) is TensorRef and value.attrs and id(value) not in self._done:
                self._done[id(value)] = value, value
                self._attribute(path, value.attrs)
            return value
        if isinstance(value, np.ndarray):
            self.arrays = True
        if depth > MAX_TREE_DEPTH or not isinstance(value, (dict, list, tuple, Record)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value, value
            self._done[id(value)] = value, self._open(value, path, depth + 1)
        return self._done[id(value)][1]

    def _open(self, value: Value, path: str, depth: int) -> Value:
        def inner(item: Value, key: Value) -> Value:
            return self.value(item, f"{path}.{key}" if path else str(key), depth)

        if isinstance(value, StdDict) and not _is_usual(value.attrs):
            self._attribute(path, value.attrs)
        if isinstance(value, dict):
            if self._is_plain(value):
                return value
            items = {key: item if type(item) in _ATOMS else inner(item, key) for key, item in value.items()}
            if _same_items(value.values(), items.values()):
                return value
            return _dict_like(value, self._flat(value, items, path))
        if isinstance(value, (list, tuple)):
            listed = [item if type(item) in _ATOMS else inner(item, i) for i, item in enumerate(value)]
            return value if _same_items(value, listed) or type(value) not in (list, tuple) else type(value)(listed)
        if is_module(value):
            return self._module(read_module(value, self._where), path, depth)
        if is_pickled_optimizer(value):
            self.optimizers.append(PickledOptimizer(value, path or "optimizer", is_placed=True))
            return self.optimizers[-1].state_dict
        return self._record(value, path, depth)

    def _is_plain(self, value: Mapping[Value, Value]) -> bool:
        """Whether a dict contains only plain tensors and values that contain nothing: it stays as it is."""
        kinds = set(map(type, value.values())) - _ATOMS
        if not kinds <= _TENSORS or (TensorRef in kinds and any(_attributes(value.values()))):
            return False
        self.tensors = self.tensors or bool(kinds)
        return True

    def _flat(self, before: Mapping[Value, Value], after: Mapping[Value, Value], path: str) -> dict[Value, Value]:
        """The dict with the parts of composite tensors as separate entries, such as `w.values`: they are weights."""
        result: dict[Value, Value] = {}
        for key, item in after.items():
            parts = {key: item}
            if isinstance(item, dict) and _is_tensor(before[key]):
                parts = dict(_flatten_parts(str(key), item))
            elif isinstance(item, tuple) and any(map(_is_tensor, before[key])):  # modules pack weight and bias so
                parts = dict(_flatten_parts(str(key), {str(i): part for i, part in enumerate(item)}))
            for name, part in parts.items():
                if name in result or (name is not key and name in before):
                    raise CorruptError(
                        f"two tensors are called `{printable(f'{path}.{name}' if path else name)}`", where=self._where
                    )
                result[name] = part
        return result

    def _record(self, record: Record, path: str, depth: int) -> Value:
        if (parts_of_dict := tensordict_parts(record)) is not None:
            content, attributes = parts_of_dict
            self._tensordicts.append(path)
            self._attribute(path, attributes)
            return self.value(content, path, depth)
        plain = plain_value(record, self._where)
        if plain is not record:
            self._plain[path] = str(record.cls)
            return self.value(plain, path, depth)
        try:
            parts = tensor_parts(record, self._where)
        except HasNoData:
            self.empty.append(path)
            return record
        if parts is not None:
            if isinstance(parts, dict):
                self._composite_tensors[path] = class_of(record)
            return self.value(parts, path, depth)
        if not isinstance(record.state, dict):
            return record
        state = {}
        for key, item in record.state.items():
            if is_pickled_optimizer(item):  # the optimizer of a scheduler: not a part of its state
                self._add_unplaced(item, f"{path}.{key}")
                state[key] = item.cls
            else:
                state[key] = self.value(item, f"{path}.{key}", depth)
        if _same_items(record.state.values(), state.values()):
            return record
        return Record(record.cls, record.args, record.kwargs, state, record.items, record.mapping, record.new)

    def _module(self, module: Module, path: str, depth: int) -> dict[str, Value]:
        self._modules[path] = module.cls
        own = {id(one) for one in (*module.modules, *module.tensors.values())}
        by_module: dict[str, Value] = {}
        for name, record in module.attributes.items():
            attributes = {}
            for key, item in (record.state or {}).items():
                place = ".".join(part for part in (path, name, str(key)) if part)
                if self._is_storable(item, own, place):
                    attributes[key] = item
                    if key != _NON_PERSISTENT and holds_tensor(item):
                        self._set_tensors.append(place)
            by_module[name] = Record(record.cls, state=attributes or None)
        self.objects[path] = by_module
        return {
            name: self.value(tensor, f"{path}.{name}" if path else name, depth)
            for name, tensor in module.tensors.items()
        }

    def _add_unplaced(self, record: Record, path: str) -> None:
        self.optimizers.append(PickledOptimizer(record, path))

    def _attribute(self, path: str, attrs: Value) -> None:
        if self._is_storable(attrs, set(), path):
            self.attributes[path] = attrs

    def _is_storable(self, value: Value, own: set[int], path: str) -> bool:
        finding = check_contents(value, own)
        if finding == "own":
            self._self_references.append(path)
        elif finding == "endless":
            self._cyclic.append(path)
        return finding == "fine"

    def place_optimizers(self, root: dict[str, Value]) -> None:
        """Put optimizers that only a scheduler refers to into the tree, each once."""
        placed = {id(one.record) for one in self.optimizers if one.is_placed}
        for one in self.optimizers:
            if id(one.record) not in placed:
                placed.add(id(one.record))
                root[next(free for free in candidate_names("optimizer") if free not in root)] = one.state_dict
                one.is_placed = True
        self.optimizers = [one for one in self.optimizers if one.is_placed]
        for one in self.optimizers:
            self.objects[one.path] = one.attributes

    def iter_notices(self) -> Iterable[Notice]:
        """The notices about all objects."""
        yield from self.notices
        if self._modules:
            named = tuple(f"{path or 'the file'} ({cls})" for path, cls in self._modules.items())
            yield Notice("pickled modules, read with the names of their state_dict()", named)
        if self.optimizers:
            named = tuple(f"{one.path} ({one.record.cls.name})" for one in self.optimizers)
            yield Notice("pickled optimizers, read as their state_dict()", named)
        if self._composite_tensors:
            named = tuple(f"{path} ({kind})" for path, kind in self._composite_tensors.items())
            yield Notice("composite tensors; each is read as the plain tensors that it consists of", named)
        if self._tensordicts:
            yield Notice("TensorDicts, read as dicts of tensors", tuple(self._tensordicts))
        if self._plain:
            named = tuple(f"{path} ({kind})" for path, kind in self._plain.items())
            yield Notice("configurations, read as the plain dicts and lists that they wrap", named)
        if self._set_tensors:
            text = "attributes of modules that contain tensors, but are not parameters or buffers: carried as extras"
            yield Notice(text, tuple(self._set_tensors), Weight.UNSURE)
        if self._self_references:
            text = "attributes that only refer to the module's own tensors or modules: not carried"
            yield Notice(text, tuple(self._self_references))
        if self._cyclic:
            text = "attributes that contain themselves, or are nested too deeply: not carried"
            yield Notice(text, tuple(self._cyclic), Weight.LOST)


def _is_usual(attrs: Mapping[str, Value]) -> bool:
    """Whether the attributes of a state dict are only the versions of its modules, which torch sets."""
    if not attrs:
        return True
    versions = attrs.get("_metadata")
    of_modules = versions.values() if isinstance(versions, dict) else ()
    return attrs.keys() == {"_metadata"} and all(isinstance(one, dict) and one.keys() <= _USUAL for one in of_modules)


_USUAL = {"version"}


def _attributes(values: Iterable[Value]) -> Iterator[Value]:
    """The attributes of the tensors among these values."""
    return (value.attrs for value in values if type(value) is TensorRef)


def _is_tensor(value: Value) -> bool:
    return isinstance(value, Record) and is_tensor(value)


def _flatten_parts(name: str, parts: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    for part, value in parts.items():
        if isinstance(value, dict) and part != OBJECT:
            yield from _flatten_parts(f"{name}.{part}", value)
        else:
            yield f"{name}.{part}", value


def _names_by_place(root: Mapping[str, Value]) -> dict[Any, str]:
    """The names of the model's tensors, by their places in storages."""
    model = find_model(without_optimizers(root, optimizers_in(root)), had_optimizer=True)
    names: dict[Any, str] = {}
    for name, leaf in named_leaves(model.tree):
        names.setdefault(place(leaf), name)
    return names


def _arrays_as_tensors(value: Value, depth: int) -> Value:
    if isinstance(value, dict) and depth <= MAX_TREE_DEPTH:
        return _dict_like(value, {key: _arrays_as_tensors(item, depth + 1) for key, item in value.items()})
    tensor = array_tensor(value)
    return value if tensor is None else tensor


def _dict_like(value: dict[Value, Value], items: dict[Value, Value]) -> dict[Value, Value]:
    if not isinstance(value, StdDict):
        return items
    result = StdDict(value.cls, value.factory)
    result.update(items)
    result.attrs = value.attrs
    return result


def _same_items(before: Iterable[Value], after: Iterable[Value]) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))
