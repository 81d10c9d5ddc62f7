"""A checkpoint as the tree of state dicts that a PyTorch training script loads.

The model's tensors are what the optimizer updates: the masters, where there are
any, since a script under mixed precision keeps its parameters in full and
rounds them as it computes. What the tree has no place for is in our own record
(`record`), under a key that no script asks for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import numpy as np

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Parameter
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.values import Record, TensorName, Value, tensor_names
from ckpt_formats.state_dicts.extras import tensors_for_names
from ckpt_formats.state_dicts.keys import StateKeys, keys_of
from ckpt_formats.state_dicts.optimizer_form import optimizers_in
from ckpt_formats.state_dicts.read import RESERVED
from ckpt_formats.state_dicts.record import KEY, record_of

_EXTRA_STATE = "_extra_state"
"""What `torch.nn.Module` calls what a module's `get_extra_state` gives."""
_ADAM: Mapping[str, Value] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Options of torch.optim.AdamW beside its numbers, as PyTorch 2.7 and later have them."""


def state_tree(source: Checkpoint, keys: StateKeys, *, objects: bool = False) -> dict[str, Value]:
    """Nested dicts and lists with `Tensor`s at the leaves, keyed as asked.

    `objects`: objects of any class may stand in it, since the format keeps each value as an item of its own,
    and who loads the others never meets it.
    """
    weights = {name: _trained(p) for name, p in source.parameters.items() if p.role != "extra"}
    model: dict[str, Value] = weights | {a: weights[name] for a, name in source.aliases.items() if name in weights}
    in_modules = _extra_states(source, model, objects)
    model |= {key: tensors_for_names(value, source.parameters) for key, value in in_modules.items()}
    tree: dict[str, Value] = dict(model) if keys.model is None else {keys.model: model}
    optimizer = _flat(source) if keys.flat else _nested(source)
    if optimizer and keys.flat and keys.optimizer is None:
        tree |= optimizer
    elif optimizer:
        tree[keys.optimizer or "optim"] = optimizer
    taken, shown = set(_names(tree, "")), dict(in_modules)
    for key, value in source.extras.items():
        fits = key not in in_modules and _fits(key, value, tree, keys, objects)
        names = list(_names(value, key)) if fits else []
        # Flattened, `a.b` of one dict is `b` of another called `a`: what comes second is not shown.
        if names and len(set(names)) == len(names) and taken.isdisjoint(names):
            taken.update(names)
            shown[key] = value
    tree |= {key: tensors_for_names(value, source.parameters) for key, value in shown.items() if key not in in_modules}
    return {**tree, KEY: record_of(source, shown)}


def added_options(source: Checkpoint) -> tuple[str, ...]:
    """Options that PyTorch's AdamW wants of each group, which the source does not speak of."""
    adam = any({"exp_avg", "exp_avg_sq"} <= p.states.keys() for p in source.parameters.values())
    if not adam or not source.groups or keys_of(source.origin.layout.get("keys")) is not None:
        return ()
    return tuple(key for key in _ADAM if not all(key in group.options for group in source.groups))


def _trained(parameter: Parameter) -> Tensor:
    return parameter.states.get(MASTER, parameter.weight)


def _states(parameter: Parameter) -> dict[str, Value]:
    """A parameter's own entry: tensors, which are counters too, since PyTorch loads into tensors."""
    states: dict[str, Value] = {s: replace(t) for s, t in parameter.states.items() if s not in (MASTER, MODEL)}
    for key, value in parameter.values.items():
        counts = key == "step" and type(value) in (int, float)
        states[key] = Tensor.of(ArrayBlob(np.asarray(value, np.float32))) if counts else value
    return states


def _groups(source: Checkpoint) -> Iterator[tuple[Group, dict[str, Value]]]:
    added = {key: _ADAM[key] for key in added_options(source)}
    for group in source.groups:
        yield (
            group,
            {**added, **{key: tensors_for_names(value, source.parameters) for key, value in group.options.items()}},
        )


def _nested(source: Checkpoint) -> dict[str, Value]:
    states = {name: held for name, p in source.parameters.items() if p.role != "extra" and (held := _states(p))}
    groups = [{**options, "params": list(group.names)} for group, options in _groups(source)]
    return {"state": tensors_for_names(states, source.parameters), "param_groups": groups} if states or groups else {}


def _flat(source: Checkpoint) -> dict[str, Value]:
    states = (
        (f"state.{name}.{state}", tensors_for_names(held, source.parameters))
        for name, parameter in source.parameters.items()
        if parameter.role != "extra"
        for state, held in _states(parameter).items()
    )
    options = (
        (f"param_groups.{name}.{key}", value)
        for group, said in _groups(source)
        for name in group.names
        for key, value in said.items()
    )
    return dict(chain(states, options))


def _extra_states(source: Checkpoint, model: Mapping[str, Value], objects: bool) -> dict[str, Value]:
    """The extras that a module's `get_extra_state` gave, without tensors: their place is in the model's dict."""
    return {
        key: value
        for key, value in source.extras.items()
        if key.rpartition(".")[2] == _EXTRA_STATE
        and key not in model
        and not isinstance(value, (dict, list, TensorName))
        and _is_plain(value, objects)
    }


def _fits(key: str, value: Value, tree: Mapping[str, Value], keys: StateKeys, objects: bool) -> bool:
    """Can it stand at the top level, and be told from all else there?"""
    if key in tree or key == KEY or key in RESERVED or not _is_plain(value, objects) or optimizers_in({key: value}):
        return False
    bare = isinstance(value, TensorName) or (keys.optimizer is None and any(tensor_names(value)))
    return not (keys.model is None and bare)


def _names(value: Value, name: str) -> Iterator[str]:
    """What a value and all that is taken out of it are called when it is flattened."""
    if not isinstance(value, dict):
        yield name
    nests = isinstance(value, list) and any(isinstance(item, (dict, list, Tensor, TensorName)) for item in value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if nests else ()
    for key, item in items:
        yield from _names(item, f"{name}.{key}" if name else str(key))


def _is_plain(value: Value, objects: bool, depth: int = 0) -> bool:
    """Does it survive being flattened to one item for each leaf? Then dicts have texts for keys, and are not empty."""
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
