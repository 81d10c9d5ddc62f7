"""Pickled `nn.Module`s: their tensors by the names of `state_dict()`, and their other attributes.

In a pickle, a module is an object with the attributes `_parameters`, `_buffers` and `_modules`, which are dicts by
name, and with the attributes that its class sets. Source: torch/nn/modules/module.py, `_save_to_state_dict`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt_formats.core.claims import MAX_NAMES
from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.values import Record, Value

_TENSORS, _MODULES = ("_parameters", "_buffers"), "_modules"
_NON_PERSISTENT = "_non_persistent_buffers_set"
_INTERNAL = {*_TENSORS, _MODULES, _NON_PERSISTENT, "training", "_is_full_backward_hook", "_version", "_backend"}


@dataclass(frozen=True)
class Module:
    """The content of a pickled module."""

    cls: str
    tensors: dict[str, Value] = field(default_factory=dict)
    """By the name in `state_dict()`. A value may be of any kind of tensor."""
    attributes: dict[str, Value] = field(default_factory=dict)
    """What `state_dict()` omits: module name -> a `Record` of its class and its other attributes."""
    modules: list[Record] = field(default_factory=list)
    """The module and all its submodules."""


def is_module(value: Value) -> bool:
    """Whether a value is an object with the attributes of a module."""
    if not isinstance(value, Record):
        return False
    if _wrapped_module(value) is not None:
        return True
    return all(isinstance(value.get(name), dict) for name in (*_TENSORS, _MODULES))


def read_module(record: Record, where: str) -> Module:
    """The content of a module and its submodules. Raises `UnsafeError` for too many names."""
    result = Module(record.cls.name)
    for name, module in _modules(record, where):
        result.modules.append(module)
        prefix = f"{name}." if name else ""
        skipped = module.get(_NON_PERSISTENT)
        skipped = skipped if isinstance(skipped, (set, frozenset, list, tuple)) else ()
        attributes: dict[str, Value] = {}
        for key, value in _members(module):
            if key in skipped:
                attributes.setdefault("_buffers", {})[key] = value
            elif value is not None:
                result.tensors[f"{prefix}{key}"] = value
        if len(result.tensors) > MAX_NAMES:
            raise UnsafeError(f"a pickled module has more than {MAX_NAMES:,} names for its tensors", where=where)
        attributes.update((key, value) for key, value in _state(module).items() if key not in _INTERNAL and value != {})
        result.attributes[name] = Record(module.cls, state=attributes or None)
    return result


def _modules(record: Record, where: str) -> Iterator[tuple[str, Record]]:
    """The module and its submodules with their names, in the order of `state_dict()`; none inside itself."""
    pending: list[tuple[str, Record, tuple[int, ...]]] = [("", record, ())]
    count = 0
    while pending:
        name, module, above = pending.pop()
        count += 1
        if count > MAX_NAMES:
            raise UnsafeError(f"a pickled module has more than {MAX_NAMES:,} submodules", where=where)
        yield name, module
        prefix, path = f"{name}." if name else "", (*above, id(module))
        pending += [
            (f"{prefix}{key}", child, path)
            for key, child in reversed(_children(module))
            if is_module(child) and id(child) not in path
        ]


def _children(module: Record) -> list[tuple[str, Value]]:
    inner = _wrapped_module(module)
    if inner is not None:
        return [("_orig_mod", inner)]
    children = module.get(_MODULES)
    return [(str(key), child) for key, child in children.items()]


def _members(module: Record) -> Iterator[tuple[str, Value]]:
    """The tensors of the module itself, and members that are objects but not modules: they may contain tensors."""
    if _wrapped_module(module) is not None:
        return
    for kind in _TENSORS:
        for key, value in module.get(kind).items():
            yield str(key), value
    for key, child in module.get(_MODULES).items():
        if child is not None and not is_module(child):
            yield str(key), child


def _state(module: Record) -> dict[str, Value]:
    return module.state if isinstance(module.state, dict) else {}


def _wrapped_module(value: Record) -> Record | None:
    """The module that `torch.compile` wrapped: `OptimizedModule(module, context)`; else None."""
    inner = value.args[0] if value.cls.name == "OptimizedModule" and value.args else None
    return inner if isinstance(inner, Record) else None
