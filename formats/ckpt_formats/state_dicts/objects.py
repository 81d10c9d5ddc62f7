"""A tree with pickled objects in it, as the tree of state dicts that its writer should have saved.

    a module                 its state dict
    an optimizer             its state dict, with parameters by name where the file has them under a name
    a tensor of parts        a dict of plain tensors: `tensor_parts`
    a list as the whole file a dict by number

What state dicts leave out, such as a module's hyper-parameters or attributes of a tensor, is carried as extras.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ckpt_formats.errors import Corrupt, Incomplete
from ckpt_formats.extras import numbered
from ckpt_formats.naming import show
from ckpt_formats.notices import Notice, Weight
from ckpt_formats.state_dicts.leaves import Leaf, between, is_extra_state, named_leaves, place
from ckpt_formats.state_dicts.model import find_model
from ckpt_formats.state_dicts.modules import Module, is_module, read_module
from ckpt_formats.state_dicts.optimizer_form import optimizers_in, without
from ckpt_formats.state_dicts.tensor_parts import OBJECT, NoData, array_tensor, class_of, is_tensor, tensor_parts
from ckpt_formats.torchfile import Storage, StorageSlice, TensorRef
from ckpt_formats.values import Record, StdDict, Value, kind_of

OBJECTS = "objects"
"""The extra that holds what objects have beside tensors."""
ATTRIBUTES = "attributes"
"""The extra that holds what was set on tensors and dicts, by their places."""
_NOT_SAVED = "_buffers"
"""The attribute that has the buffers which a module does not save."""
_MOST_DEPTH = 100


@dataclass(frozen=True)
class Opened:
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
    if _is_optimizer_object(value):
        return {"optimizer": value}, ()
    if isinstance(value, Record) and isinstance(value.state, dict) and not is_tensor(value):
        said = Notice(f"the file is an object of class {value.cls}: its attributes are read like a dict's entries")
        return value.state, (said,)
    return {"value": value}, ()


def open_objects(root: Mapping[str, Value], where: str) -> Opened:
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
        one.fill(names, opening)
    beside = {OBJECTS: opening.objects, ATTRIBUTES: opening.attributes}
    extras = {next(free for free in numbered(key) if free not in made): extra for key, extra in beside.items() if extra}
    return Opened(made, extras, tuple(opening.said()))


def attributes_of(root: Value) -> dict[str, Value]:
    """What was set on the dict that is the whole file, as an extra."""
    return {ATTRIBUTES: root.attrs} if isinstance(root, StdDict) and not _is_usual(root.attrs) else {}


def not_weights(model: Mapping[Value, Value], rest: Mapping[str, Value]) -> tuple[Notice, ...]:
    """What is said of entries of the model's dict, and of those beside it, that hold tensors and are no weights.

    `rest` is empty where the model has a dict of its own: then nothing but tensors should be in that.
    """
    inside = [(key, value) for key, value in between(model) if not is_extra_state(key) and not key.endswith(_OBJECT)]
    odd = (Record, Storage, StorageSlice) if rest else (Record, Storage, StorageSlice, np.ndarray)
    lost = [(key, value) for key, value in inside if isinstance(value, odd) or _holds_tensor(value)]
    lost += [
        (key, value) for key, value in rest.items() if isinstance(value, (Storage, StorageSlice)) or _is_holder(value)
    ]
    files = [key for key, value in (*inside, *rest.items()) if _is_file(value)]
    return tuple(
        Notice(text, names, Weight.LOST)
        for text, names in (
            (
                "holds tensors in a form that is not understood; carried as extras, not as weights",
                tuple(f"{key} ({_kind(value)})" for key, value in lost),
            ),
            ("holds the bytes of a file, which is not read; carried as extras", tuple(files)),
        )
        if names
    )


_OBJECT = f".{OBJECT}"


def _is_holder(value: Value) -> bool:
    """Is it an object or a list with tensors right in it?"""
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, Leaf) for item in value)
    return isinstance(value, Record) and _holds_tensor(value)


def _kind(value: Value) -> str:
    if isinstance(value, Record):
        return value.cls.qualname
    return "NumPy" if isinstance(value, np.ndarray) else type(value).__name__.lower()


def _is_file(value: Value) -> bool:
    """Are they the bytes of an archive or of a pickle, as they are or in an `io.BytesIO`?"""
    if isinstance(value, Record) and value.cls.name == "BytesIO":
        parts = value.state if isinstance(value.state, tuple) else value.args
        value = parts[0] if parts else None
    if not isinstance(value, (bytes, bytearray)) or len(value) < _LEAST_FILE:
        return False
    return bytes(value[:4]) == b"PK\3\4" or (value[0] == 0x80 and value[1] <= 5 and value[-1:] == b".")


_LEAST_FILE = 16


def _holds_tensor(value: Value) -> bool:
    """Anywhere in it, also in lists and objects."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (Leaf, Storage, StorageSlice)):
            return True
        if isinstance(one, (dict, list, tuple, set, frozenset, Record)) and id(one) not in seen:
            seen.add(id(one))
            waiting += _parts_of(one)
    return False


@dataclass(eq=False)
class _Optimizer:
    """A pickled optimizer; its state dict is filled in once all names are known."""

    record: Record
    path: str
    made: dict[str, Value] = field(default_factory=dict)
    is_placed: bool = False
    """Is it in the tree, or only mentioned by another object, such as its scheduler?"""

    def fill(self, names: Mapping[Any, str], opening: "_Opening") -> None:
        """Number its parameters as `state_dict()` does, or call all of them by name if all have one."""
        groups: list[dict[Value, Value]] = self.record.get("param_groups")
        numbers: dict[int, Value] = {}
        tensors = []
        for group in groups:
            for one in group.get("params", ()):
                if id(one) not in numbers:
                    numbers[id(one)] = len(numbers)
                    tensors.append(one)
        known = {id(one): names.get(place(one)) for one in tensors if isinstance(one, Leaf)}
        if len(known) == len(tensors) and all(known.values()) and len(set(known.values())) == len(known):
            numbers.update(known)
        elif tensors:
            opening.objects[f"{self.path}.params"] = tensors
        state = {
            numbers.get(id(key), key): opening.value(kept, f"{self.path}.state", 1) for key, kept in self._states()
        }
        self.made["state"] = state
        self.made["param_groups"] = [
            {
                **{key: opening.value(option, f"{self.path}.param_groups", 1) for key, option in group.items()},
                "params": [numbers[id(one)] for one in group.get("params", ())],
            }
            for group in groups
        ]

    def _states(self) -> Iterable[tuple[Value, Value]]:
        states: dict[Value, Value] = self.record.get("state")
        return states.items()


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
        self.optimizers: list[_Optimizer] = []
        self.objects: dict[str, Value] = {}
        self.attributes: dict[str, Value] = {}
        self.empty: list[str] = []
        self.tensors = self.arrays = False
        self.notices: list[Notice] = []

    def value(self, value: Value, path: str, depth: int) -> Value:
        """The value with all objects in it opened. What holds itself stays as it is there."""
        if isinstance(value, Leaf):
            self.tensors = True
            if isinstance(value, TensorRef) and value.attrs and id(value) not in self._done:
                self._done[id(value)] = value, value
                self._attribute(path, value.attrs)
            return value
        if isinstance(value, np.ndarray):
            self.arrays = True
        if depth > _MOST_DEPTH or not isinstance(value, (dict, list, tuple, Record)):
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
            items = {key: inner(item, key) for key, item in value.items()}
            made = self._flat(value, items, path)
            return value if _alike(value.values(), items.values()) else _dict_like(value, made)
        if isinstance(value, (list, tuple)):
            listed = [inner(item, i) for i, item in enumerate(value)]
            return value if _alike(value, listed) or type(value) not in (list, tuple) else type(value)(listed)
        if is_module(value):
            return self._module(read_module(value, self._where), path, depth)
        if _is_optimizer_object(value):
            self.optimizers.append(_Optimizer(value, path or "optimizer", is_placed=True))
            return self.optimizers[-1].made
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
                        f"two tensors are called `{show(f'{path}.{name}' if path else name)}`", where=self._where
                    )
                made[name] = part
        return made

    def _record(self, record: Record, path: str, depth: int) -> Value:
        try:
            parts = tensor_parts(record, self._where)
        except NoData:
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
            if _is_optimizer_object(item):  # a scheduler's; it is no part of its state
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
                    if key != _NOT_SAVED and _holds_tensor(item):
                        self._set.append(place)
            attributes[name] = Record(record.cls, state=kept or None)
        self.objects[path] = attributes
        return {
            name: self.value(tensor, f"{path}.{name}" if path else name, depth)
            for name, tensor in module.tensors.items()
        }

    def _mention(self, record: Record, path: str) -> None:
        self.optimizers.append(_Optimizer(record, path))

    def _attribute(self, path: str, attrs: Value) -> None:
        if self._can_be_carried(attrs, set(), path):
            self.attributes[path] = attrs

    def _can_be_carried(self, value: Value, own: set[int], path: str) -> bool:
        seen = _look(value, own)
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
                root[next(free for free in numbered("optimizer") if free not in root)] = one.made
                one.is_placed = True
        self.optimizers = [one for one in self.optimizers if one.is_placed]
        for one in self.optimizers:
            state = one.record.state
            rest = {key: item for key, item in state.items() if key not in ("state", "param_groups")}
            self.objects[one.path] = Record(one.record.cls, state=rest or None)

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


def _is_optimizer_object(value: Value) -> bool:
    if not isinstance(value, Record) or not isinstance(value.state, dict):
        return False
    groups = value.state.get("param_groups")
    listed = isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)
    return listed and isinstance(value.state.get("state"), dict)


def _names(root: Mapping[str, Value]) -> dict[Any, str]:
    """Names of the model's tensors by their places."""
    model = find_model(without(root, optimizers_in(root)), beside_optimizer=True)
    names: dict[Any, str] = {}
    for name, leaf in named_leaves(model.tree):
        names.setdefault(place(leaf), name)
    return names


def _arrays_as_tensors(value: Value, depth: int) -> Value:
    if isinstance(value, dict) and depth <= _MOST_DEPTH:
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


def _look(value: Value, own: set[int]) -> Literal["fine", "own", "endless"]:
    """Is something in it that is `own`, or that holds itself or is nested too deeply?"""
    done: set[int] = set()
    above: dict[int, None] = {}
    stack: list[tuple[int, Any]] = [(0, iter((value,)))]
    while stack:
        part = next(stack[-1][1], stack)
        if part is stack:
            key, _ = stack.pop()
            above.pop(key, None)
            done.add(key)
        elif id(part) in own:
            return "own"
        elif id(part) in above or len(stack) > _MOST_DEPTH:
            return "endless"
        elif id(part) not in done and isinstance(part, (dict, list, tuple, set, frozenset, Record, TensorRef)):
            above[id(part)] = None
            stack.append((id(part), iter(_parts_of(part))))
    return "fine"


def _parts_of(value: Value) -> Iterable[Value]:
    if isinstance(value, Record):
        return [value.args, value.kwargs, value.state, value.items, value.mapping]
    if isinstance(value, TensorRef):
        return [value.attrs]
    if isinstance(value, dict):
        return [*value, *value.values(), getattr(value, "attrs", None)]
    parts: Iterable[Value] = value
    return parts
