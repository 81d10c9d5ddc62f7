"""Pickled `nn.Module`s: their tensors by the names that `state_dict()` gives, and what else they are.

A pickle has a module as an object whose attributes are `_parameters`, `_buffers` and `_modules`, dicts by name, and
whatever its class sets. Source: torch/nn/modules/module.py, `_save_to_state_dict`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt_formats.core.errors import Unsafe
from ckpt_formats.core.values import Record, Value

_TENSORS, _MODULES = ("_parameters", "_buffers"), "_modules"
_NOT_SAVED = "_non_persistent_buffers_set"
_INTERNAL = {*_TENSORS, _MODULES, _NOT_SAVED, "training", "_is_full_backward_hook", "_version", "_backend"}
_MAX_NAMES = 500_000


@dataclass(frozen=True)
class Module:
    """What a pickled module holds."""

    cls: str
    tensors: dict[str, Value] = field(default_factory=dict)
    """By the name in `state_dict()`; of any kind that the pickle has."""
    attributes: dict[str, Value] = field(default_factory=dict)
    """What `state_dict()` leaves out: of each module, by its name, the class and the attributes, as a `Record`."""
    within: list[Record] = field(default_factory=list)
    """The module and all modules in it."""


def is_module(value: Value) -> bool:
    """Is it an object with the attributes of a module?"""
    if not isinstance(value, Record):
        return False
    if _compiled(value) is not None:
        return True
    return all(isinstance(value.get(name), dict) for name in (*_TENSORS, _MODULES))


def read_module(record: Record, where: str) -> Module:
    """A module with all modules in it. Raises `Unsafe` for one with names without end."""
    found = Module(record.cls.name)
    for name, module in _modules(record, where):
        found.within.append(module)
        prefix = f"{name}." if name else ""
        skipped = module.get(_NOT_SAVED)
        skipped = skipped if isinstance(skipped, (set, frozenset, list, tuple)) else ()
        kept: dict[str, Value] = {}
        for key, value in _own(module):
            if key in skipped:
                kept.setdefault("_buffers", {})[key] = value
            elif value is not None:
                found.tensors[f"{prefix}{key}"] = value
        if len(found.tensors) > _MAX_NAMES:
            raise Unsafe(f"a pickled module calls its tensors by more than {_MAX_NAMES:,} names", where=where)
        kept.update((key, value) for key, value in _attributes(module).items() if key not in _INTERNAL and value != {})
        found.attributes[name] = Record(module.cls, state=kept or None)
    return found


def _modules(record: Record, where: str) -> Iterator[tuple[str, Record]]:
    """The module and those in it by their names, in the order of `state_dict()`; none inside itself."""
    waiting: list[tuple[str, Record, tuple[int, ...]]] = [("", record, ())]
    count = 0
    while waiting:
        name, module, above = waiting.pop()
        count += 1
        if count > _MAX_NAMES:
            raise Unsafe(f"a pickled module holds more than {_MAX_NAMES:,} others", where=where)
        yield name, module
        prefix, path = f"{name}." if name else "", (*above, id(module))
        waiting += [
            (f"{prefix}{key}", child, path)
            for key, child in reversed(_children(module))
            if is_module(child) and id(child) not in path
        ]


def _children(module: Record) -> list[tuple[str, Value]]:
    inner = _compiled(module)
    if inner is not None:
        return [("_orig_mod", inner)]
    children = module.get(_MODULES)
    return [(str(key), child) for key, child in children.items()]


def _own(module: Record) -> Iterator[tuple[str, Value]]:
    """Tensors of the module itself; also members that are objects, but no modules: something may be in them."""
    if _compiled(module) is not None:
        return
    for kind in _TENSORS:
        for key, value in module.get(kind).items():
            yield str(key), value
    for key, child in module.get(_MODULES).items():
        if child is not None and not is_module(child):
            yield str(key), child


def _attributes(module: Record) -> dict[str, Value]:
    return module.state if isinstance(module.state, dict) else {}


def _compiled(value: Record) -> Record | None:
    """What `torch.compile` has wrapped: `OptimizedModule(module, context)`."""
    inner = value.args[0] if value.cls.name == "OptimizedModule" and value.args else None
    return inner if isinstance(inner, Record) else None
