"""A checkpoint as the tree of state dicts that a PyTorch training script loads.

The model's tensors are those that the optimizer updates: the masters, if there
are any, because a script with mixed precision has its parameters in full
precision and rounds them during computation. The tree cannot express all facts:
the others are in an entry of ckpt (`record`), under a key that scripts do not read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import numpy as np

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Parameter
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.values import Record, TensorName, Value, tensor_names
from ckpt_formats.state_dicts.extras import tensors_for_names
from ckpt_formats.state_dicts.keys import StateKeys, keys_of
from ckpt_formats.state_dicts.optimizer_form import optimizers_in
from ckpt_formats.state_dicts.read import RESERVED
from ckpt_formats.state_dicts.record import KEY, record_of

_EXTRA_STATE = "_extra_state"
"""The name that `torch.nn.Module` gives the result of `get_extra_state`."""
_ADAMW_OPTIONS: Mapping[str, Value] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Options of torch.optim.AdamW that are not numbers, in PyTorch 2.7 and later."""


def state_tree(source: Checkpoint, keys: StateKeys, *, objects: bool = False) -> dict[str, Value]:
    """Nested dicts and lists with `Tensor`s at the leaves, keyed as `keys` states.

    `objects`: the tree may contain objects of any class, because the format stores each value as a separate item,
    and a script can load the others without it.
    """
    weights = {name: _trained_tensor(p) for name, p in source.parameters.items() if p.role != "extra"}
    model: dict[str, Value] = weights | {a: weights[name] for a, name in source.aliases.items() if name in weights}
    in_modules = _extra_states(source, model, objects)
    model |= {key: tensors_for_names(value, source.parameters) for key, value in in_modules.items()}
    tree: dict[str, Value] = dict(model) if keys.model is None else {keys.model: model}
    optimizer = _flat(source) if keys.flat else _nested(source)
    if optimizer and keys.flat and keys.optimizer is None:
        tree |= optimizer
    elif optimizer:
        tree[keys.optimizer or "optim"] = optimizer
    used_names, shown = set(_flat_names(tree, "")), dict(in_modules)
    for key, value in source.extras.items():
        fits = key not in in_modules and _can_be_shown(key, value, tree, keys, objects)
        names = list(_flat_names(value, key)) if fits else []
        # In a flat tree, key `a.b` equals key `b` inside `a`: the second one is not shown.
        if names and len(set(names)) == len(names) and used_names.isdisjoint(names):
            used_names.update(names)
            shown[key] = value
    tree |= {key: tensors_for_names(value, source.parameters) for key, value in shown.items() if key not in in_modules}
    return {**tree, KEY: record_of(source, shown)}


def added_options(source: Checkpoint) -> tuple[str, ...]:
    """Options that PyTorch's AdamW needs in each group, and that the source does not have."""
    adam = any({"exp_avg", "exp_avg_sq"} <= p.states.keys() for p in source.parameters.values())
    if not adam or not source.groups or keys_of(source.origin.layout.get("keys")) is not None:
        return ()
    return tuple(key for key in _ADAMW_OPTIONS if not all(key in group.options for group in source.groups))


def _trained_tensor(parameter: Parameter) -> Tensor:
    return parameter.states.get(MASTER, parameter.weight)


def _states(parameter: Parameter) -> dict[str, Value]:
    """The states of a parameter. Step counters become tensors too, because PyTorch loads into tensors."""
    states: dict[str, Value] = {
        to_stored(s): replace(t) for s, t in parameter.states.items() if s not in (MASTER, MODEL)
    }
    for key, value in parameter.values.items():
        counts = key == "step" and type(value) in (int, float)
        states[key] = Tensor.of(ArrayBlob(np.asarray(value, np.float32))) if counts else value
    return states


def _groups(source: Checkpoint) -> Iterator[tuple[Group, dict[str, Value]]]:
    added = {key: _ADAMW_OPTIONS[key] for key in added_options(source)}
    for group in source.groups:
        yield (
            group,
            {**added, **{key: tensors_for_names(value, source.parameters) for key, value in group.options.items()}},
        )


def _nested(source: Checkpoint) -> dict[str, Value]:
    states = {name: own for name, p in source.parameters.items() if p.role != "extra" and (own := _states(p))}
    groups = [{**options, "params": list(group.names)} for group, options in _groups(source)]
    return {"state": tensors_for_names(states, source.parameters), "param_groups": groups} if states or groups else {}


def _flat(source: Checkpoint) -> dict[str, Value]:
    states = (
        (f"state.{name}.{state}", tensors_for_names(value, source.parameters))
        for name, parameter in source.parameters.items()
        if parameter.role != "extra"
        for state, value in _states(parameter).items()
    )
    options = (
        (f"param_groups.{name}.{key}", value)
        for group, group_options in _groups(source)
        for name in group.names
        for key, value in group_options.items()
    )
    return dict(chain(states, options))


def _extra_states(source: Checkpoint, model: Mapping[str, Value], objects: bool) -> dict[str, Value]:
    """Results of a module's `get_extra_state` without tensors; they belong into the model's dict."""
    return {
        key: value
        for key, value in source.extras.items()
        if key.rpartition(".")[2] == _EXTRA_STATE
        and key not in model
        and not isinstance(value, (dict, list, TensorName))
        and _is_plain(value, objects)
    }


def _can_be_shown(key: str, value: Value, tree: Mapping[str, Value], keys: StateKeys, objects: bool) -> bool:
    """Whether a value can be at the top level without being mistaken for another entry."""
    if key in tree or key == KEY or key in RESERVED or not _is_plain(value, objects) or optimizers_in({key: value}):
        return False
    bare = isinstance(value, TensorName) or (keys.optimizer is None and any(tensor_names(value)))
    return not (keys.model is None and bare)


def _flat_names(value: Value, name: str) -> Iterator[str]:
    """The names of a value and of everything in it when the tree is flattened."""
    if not isinstance(value, dict):
        yield name
    nests = isinstance(value, list) and any(isinstance(item, (dict, list, Tensor, TensorName)) for item in value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if nests else ()
    for key, item in items:
        yield from _flat_names(item, f"{name}.{key}" if name else str(key))


def _is_plain(value: Value, objects: bool, depth: int = 0) -> bool:
    """Whether a value can be flattened without loss: the keys of its dicts are texts, and no dict is empty."""
    if depth > 20:
        return False
    if type(value) is dict:
        named = all(type(key) is str and key for key in value)
        return named and bool(value) and all(_is_plain(item, objects, depth + 1) for item in value.values())
    if type(value) in (list, tuple):
        return all(_is_plain(item, objects, depth + 1) for item in value)
    if type(value) is Record:
        return objects
    return value is None or type(value) in (bool, int, float, str, bytes, TensorName)
