"""A tree with pickled objects in it, as the tree of state dicts that its writer should have saved.

    a module                 its state dict
    an optimizer             its state dict, with parameters by name where the file has them under a name
    a tensor of parts        a dict of plain tensors: `tensor_parts`
    a list as the whole file a dict by number

What state dicts leave out, such as a module's hyper-parameters or attributes of a tensor, is carried as extras.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_formats.containers.torchfile import TensorRef
from ckpt_formats.core.errors import Corrupt, Incomplete
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, StdDict, Value, kind_of
from ckpt_formats.state_dicts.extras import numbered
from ckpt_formats.state_dicts.leaves import named_leaves, place
from ckpt_formats.state_dicts.model import find_model
from ckpt_formats.state_dicts.modules import Module, is_module, read_module
from ckpt_formats.state_dicts.optimizer_form import optimizers_in, without
from ckpt_formats.state_dicts.pickled_optimizer import PickledOptimizer, is_pickled_optimizer
from ckpt_formats.state_dicts.tensor_parts import OBJECT, HasNoData, array_tensor, class_of, is_tensor, tensor_parts
from ckpt_formats.state_dicts.walk import MOST_DEPTH, holds_tensor, look

OBJECTS = "objects"
"""The extra that holds what objects have beside tensors."""
ATTRIBUTES = "attributes"
"""The extra that holds what was set on tensors and dicts, by their places."""
_NOT_SAVED = "_buffers"
"""The attribute that has the buffers which a module does not save."""
_ATOMS = frozenset((bool, int, float, str, bytes, type(None)))
"""What has nothing in it to open, and most of what a file has."""


@dataclass(frozen=True)
class OpenedObjects:
    """A tree without objects that hold weights, and what is to be said of them."""

    root: dict[str, Value]
    extras: dict[str, Value]
    """What objects hold beside weights."""
    notices: tuple[Notice, ...]


def as_root(value: Value) -> tuple[dict[Value, Value], tuple[Notice, ...]]:
    """What a file holds, as a dict, and what is to be said of a file that holds something else."""
    if isinstance(value, dict):
        return value, ()
    if isinstance(value, (list, tuple)):
        said = Notice(f"the file is {kind_of(value)}, not a dict: its items are called by their numbers")
        return {str(i): item for i, item in enumerate(value)}, (said,)
    if is_module(value):
        return {"model": value}, ()
    if is_pickled_optimizer(value):
        return {"optimizer": value}, ()
    if isinstance(value, Record) and isinstance(value.state, dict) and not is_tensor(value):
        said = Notice(f"the file is an object of class {value.cls}: its attributes are read like a dict's entries")
        return value.state, (said,)
    return {"value": value}, ()


def open_objects(root: Mapping[str, Value], where: str) -> OpenedObjects:
    """Give every object of the tree the form of a state dict. A tree without any stays as it is.

    Raises `Incomplete` for tensors without values.
    """
    opening = _Opening(where)
    made: dict[str, Value] = opening.value(dict(root), "", 0)
    if opening.empty:
        raise Incomplete(
            f"has no data for {len(opening.empty)} of its tensors, such as `{opening.empty[0]}`: they were on the "
            "device `meta`, or had no shape yet",
            where=where,
            hint="Load the model with its weights (to_empty() and load_state_dict()), and save it again.",
        )
    if not opening.tensors and opening.arrays:
        made = _arrays_as_tensors(made, 0)
        opening.notices.append(Notice("the NumPy arrays of the file are read as its tensors", (), Weight.UNSURE))
    opening.place_optimizers(made)
    names = _names(made) if opening.optimizers else {}
    for one in opening.optimizers:
        unnamed = one.fill(names, lambda value, path: opening.value(value, path, 1), where)
        if unnamed:
            opening.objects[f"{one.path}.params"] = unnamed
    beside = {OBJECTS: opening.objects, ATTRIBUTES: opening.attributes}
    extras = {next(free for free in numbered(key) if free not in made): extra for key, extra in beside.items() if extra}
    return OpenedObjects(made, extras, tuple(opening.said()))


def attributes_of(root: Value) -> dict[str, Value]:
    """What was set on the dict that is the whole file, as an extra."""
    return {ATTRIBUTES: root.attrs} if isinstance(root, StdDict) and not _is_usual(root.attrs) else {}


class _Opening:
    """One walk over a tree."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._done: dict[int, tuple[Value, Value]] = {}
        self._modules: dict[str, str] = {}
        self._parts: dict[str, str] = {}
        self._set: list[str] = []
        self._derived: list[str] = []
        self._endless: list[str] = []
        self.optimizers: list[PickledOptimizer] = []
        self.objects: dict[str, Value] = {}
        self.attributes: dict[str, Value] = {}
        self.empty: list[str] = []
        self.tensors = self.arrays = False
        self.notices: list[Notice] = []

    def value(self, value: Value, path: str, depth: int) -> Value:
        """The value with all objects in it opened. What holds itself stays as it is there."""
        if isinstance(value, (TensorRef, Tensor)):
            self.tensors = True
            if type(value) is TensorRef and value.attrs and id(value) not in self._done:
                self._done[id(value)] = value, value
                self._attribute(path, value.attrs)
            return value
        if isinstance(value, np.ndarray):
            self.arrays = True
        if depth > MOST_DEPTH or not isinstance(value, (dict, list, tuple, Record)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value, value
            self._done[id(value)] = value, self._opened(value, path, depth + 1)
        return self._done[id(value)][1]

    def _opened(self, value: Value, path: str, depth: int) -> Value:
        def inner(item: Value, key: Value) -> Value:
            return self.value(item, f"{path}.{key}" if path else str(key), depth)

        if isinstance(value, StdDict) and not _is_usual(value.attrs):
            self._attribute(path, value.attrs)
        if isinstance(value, dict):
            items = {key: item if type(item) in _ATOMS else inner(item, key) for key, item in value.items()}
            if _alike(value.values(), items.values()):
                return value
            return _dict_like(value, self._flat(value, items, path))
        if isinstance(value, (list, tuple)):
            listed = [item if type(item) in _ATOMS else inner(item, i) for i, item in enumerate(value)]
            return value if _alike(value, listed) or type(value) not in (list, tuple) else type(value)(listed)
        if is_module(value):
            return self._module(read_module(value, self._where), path, depth)
        if is_pickled_optimizer(value):
            self.optimizers.append(PickledOptimizer(value, path or "optimizer", is_placed=True))
            return self.optimizers[-1].state_dict
        return self._record(value, path, depth)

    def _flat(self, before: Mapping[Value, Value], after: Mapping[Value, Value], path: str) -> dict[Value, Value]:
        """A dict with the parts of its tensors as its own entries, `w.values` beside `b`: so are they weights."""
        made: dict[Value, Value] = {}
        for key, item in after.items():
            parts = {key: item}
            if isinstance(item, dict) and _is_tensor(before[key]):
                parts = dict(_joined(str(key), item))
            elif isinstance(item, tuple) and any(map(_is_tensor, before[key])):  # as modules pack weight and bias
                parts = dict(_joined(str(key), {str(i): part for i, part in enumerate(item)}))
            for name, part in parts.items():
                if name in made or (name is not key and name in before):
                    raise Corrupt(
                        f"two tensors are called `{printable(f'{path}.{name}' if path else name)}`", where=self._where
                    )
                made[name] = part
        return made

    def _record(self, record: Record, path: str, depth: int) -> Value:
        try:
            parts = tensor_parts(record, self._where)
        except HasNoData:
            self.empty.append(path)
            return record
        if parts is not None:
            if isinstance(parts, dict):
                self._parts[path] = class_of(record)
            return self.value(parts, path, depth)
        if not isinstance(record.state, dict):
            return record
        state = {}
        for key, item in record.state.items():
            if is_pickled_optimizer(item):  # a scheduler's; it is no part of its state
                self._mention(item, f"{path}.{key}")
                state[key] = item.cls
            else:
                state[key] = self.value(item, f"{path}.{key}", depth)
        if _alike(record.state.values(), state.values()):
            return record
        return Record(record.cls, record.args, record.kwargs, state, record.items, record.mapping, record.new)

    def _module(self, module: Module, path: str, depth: int) -> dict[str, Value]:
        self._modules[path] = module.cls
        own = {id(one) for one in (*module.within, *module.tensors.values())}
        attributes: dict[str, Value] = {}
        for name, record in module.attributes.items():
            kept = {}
            for key, item in (record.state or {}).items():
                place = ".".join(part for part in (path, name, str(key)) if part)
                if self._can_be_carried(item, own, place):
                    kept[key] = item
                    if key != _NOT_SAVED and holds_tensor(item):
                        self._set.append(place)
            attributes[name] = Record(record.cls, state=kept or None)
        self.objects[path] = attributes
        return {
            name: self.value(tensor, f"{path}.{name}" if path else name, depth)
            for name, tensor in module.tensors.items()
        }

    def _mention(self, record: Record, path: str) -> None:
        self.optimizers.append(PickledOptimizer(record, path))

    def _attribute(self, path: str, attrs: Value) -> None:
        if self._can_be_carried(attrs, set(), path):
            self.attributes[path] = attrs

    def _can_be_carried(self, value: Value, own: set[int], path: str) -> bool:
        seen = look(value, own)
        if seen == "own":
            self._derived.append(path)
        elif seen == "endless":
            self._endless.append(path)
        return seen == "fine"

    def place_optimizers(self, root: dict[str, Value]) -> None:
        """Put optimizers that only a scheduler mentions into the tree, and none twice."""
        placed = {id(one.record) for one in self.optimizers if one.is_placed}
        for one in self.optimizers:
            if id(one.record) not in placed:
                placed.add(id(one.record))
                root[next(free for free in numbered("optimizer") if free not in root)] = one.state_dict
                one.is_placed = True
        self.optimizers = [one for one in self.optimizers if one.is_placed]
        for one in self.optimizers:
            self.objects[one.path] = one.attributes

    def said(self) -> Iterable[Notice]:
        """What the user should know."""
        yield from self.notices
        if self._modules:
            named = tuple(f"{path or 'the file'} ({cls})" for path, cls in self._modules.items())
            yield Notice("pickled modules, read by the names that state_dict() gives", named)
        if self.optimizers:
            named = tuple(f"{one.path} ({one.record.cls.name})" for one in self.optimizers)
            yield Notice("pickled optimizers, read as state_dict() gives them", named)
        if self._parts:
            named = tuple(f"{path} ({what})" for path, what in self._parts.items())
            yield Notice("not plain tensors; each is read as the tensors it consists of", named)
        if self._set:
            text = "attributes of modules that hold tensors, but are no parameters or buffers: carried as extras"
            yield Notice(text, tuple(self._set), Weight.UNSURE)
        if self._derived:
            text = "attributes that only refer to the module's own tensors or modules: not carried"
            yield Notice(text, tuple(self._derived))
        if self._endless:
            text = "attributes that hold themselves, or are nested too deeply: not carried"
            yield Notice(text, tuple(self._endless), Weight.LOST)


def _is_usual(attrs: Mapping[str, Value]) -> bool:
    """Is nothing set on a state dict but the versions of its modules, which torch sets and their classes state?"""
    if not attrs:
        return True
    versions = attrs.get("_metadata")
    of_modules = versions.values() if isinstance(versions, dict) else ()
    return attrs.keys() == {"_metadata"} and all(isinstance(one, dict) and one.keys() <= _USUAL for one in of_modules)


_USUAL = {"version"}


def _is_tensor(value: Value) -> bool:
    return isinstance(value, Record) and is_tensor(value)


def _joined(name: str, parts: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    for part, value in parts.items():
        if isinstance(value, dict) and part != OBJECT:
            yield from _joined(f"{name}.{part}", value)
        else:
            yield f"{name}.{part}", value


def _names(root: Mapping[str, Value]) -> dict[Any, str]:
    """Names of the model's tensors by their places."""
    model = find_model(without(root, optimizers_in(root)), beside_optimizer=True)
    names: dict[Any, str] = {}
    for name, leaf in named_leaves(model.tree):
        names.setdefault(place(leaf), name)
    return names


def _arrays_as_tensors(value: Value, depth: int) -> Value:
    if isinstance(value, dict) and depth <= MOST_DEPTH:
        return _dict_like(value, {key: _arrays_as_tensors(item, depth + 1) for key, item in value.items()})
    tensor = array_tensor(value)
    return value if tensor is None else tensor


def _dict_like(value: dict[Value, Value], items: dict[Value, Value]) -> dict[Value, Value]:
    if not isinstance(value, StdDict):
        return items
    made = StdDict(value.cls, value.factory)
    made.update(items)
    made.attrs = value.attrs
    return made


def _alike(before: Iterable[Value], after: Iterable[Value]) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))
