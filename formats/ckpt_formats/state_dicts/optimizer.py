"""An optimizer's state dict, told to the names of the model's tensors.

States are keyed by FQN, by number (the parameter's place in the groups), or flat:

    {'state': {fqn: {'exp_avg': tensor, ...}}, 'param_groups': [{'lr': ..., 'params': [fqn, ...]}, ...]}
    {'state': {0: {'exp_avg': tensor, ...}},   'param_groups': [{'lr': ..., 'params': [0, ...]}, ...]}
    {'state': {'0': {...}},                    'param_groups': [{'lr': ..., 'params': [0, ...]}, ...]}
    {'state.<fqn>.exp_avg': tensor, 'param_groups.<fqn>.lr': ...}

Source: torch.optim.Optimizer.state_dict, torch.distributed.checkpoint.state_dict.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_formats.base import Group
from ckpt_formats.errors import BadRules
from ckpt_formats.naming import show
from ckpt_formats.numbering import Named, Run, Slot, is_state_of, one_way
from ckpt_formats.state_dicts.leaves import Leaf, has_tensor, tensor_leaf
from ckpt_formats.tensor import Tensor
from ckpt_formats.typed_json import encode
from ckpt_formats.values import Value

_FLAT = ("state", "param_groups")


@dataclass(frozen=True)
class Matched:
    """An optimizer whose states have found their parameters."""

    groups: tuple[Group, ...]
    states: Mapping[str, dict[str, Tensor]]
    values: Mapping[str, dict[str, Value]]


def is_optimizer(value: Value) -> bool:
    """Is it the state dict of an optimizer, nested or flat?"""
    return _is_nested(value) or is_flat(value)


def is_flat(value: Value) -> bool:
    """Is it a flattened state dict of an optimizer?"""
    if not isinstance(value, dict) or not value:
        return False
    parts = [key.partition(".") if isinstance(key, str) else ("", "", "") for key in value]
    return all(head in _FLAT and rest for head, _, rest in parts) and any(head == "state" for head, _, _ in parts)


def match(
    optimizer: Mapping[str, Value], names: Iterable[str], trainable: Sequence[Named], order: Sequence[str] = ()
) -> Matched | None:
    """States by name, or by number if there is exactly one way to name them; None if not.

    `names` are those of all the model's tensors, `trainable` those that an
    optimizer may have in the model's order. `order` is what the user says of
    the parameters that are numbered: their names, from number 0 on.
    """
    known = set(names)
    if is_flat(optimizer):
        nested = _nested(optimizer, known)
        return None if nested is None else _match(*nested, known, trainable, order)
    return _match(optimizer.get("state", {}), optimizer["param_groups"], known, trainable, order)


def _match(
    keyed: Mapping[Value, Mapping[str, Value]],
    listed: Sequence[Mapping[str, Value]],
    names: set[str],
    trainable: Sequence[Named],
    order: Sequence[str],
) -> Matched | None:
    if not all(isinstance(group.get("params"), list) for group in listed):
        return None
    members = [list(group["params"]) for group in listed]
    if not all(isinstance(key, (str, int)) for group in members for key in group):
        return None
    keyed = _as_numbers(keyed, {key for group in members for key in group})
    titles = _titles(keyed, listed, members, trainable, order)
    if titles is None or not all(isinstance(name, str) and name in names for name in titles.values()):
        return None
    if not (set(keyed) | {key for group in members for key in group}) <= titles.keys():
        return None
    states: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Value]] = {}
    for key, state in keyed.items():
        tensors = {str(k): tensor_leaf(v) for k, v in state.items() if isinstance(v, Leaf)}
        states[titles[key]] = tensors
        values[titles[key]] = {str(k): v for k, v in state.items() if str(k) not in tensors}
    groups = (
        Group(
            {str(k): v for k, v in group.items() if k not in ("params", "param_names")},
            tuple(titles[key] for key in keys),
        )
        for group, keys in zip(listed, members, strict=True)
    )
    return Matched(tuple(groups), states, values)


def _as_numbers(keyed: Mapping[Value, Mapping[str, Value]], members: set[Value]) -> Mapping[Value, Mapping[str, Value]]:
    """States by the numbers that the groups list. DCP makes strings of all keys of dicts, but not of lists' items."""
    named = {str(member): member for member in members if type(member) is int}
    return {named.get(key, key) if isinstance(key, str) else key: state for key, state in keyed.items()}


def _titles(
    keyed: Mapping[Value, Mapping[str, Value]],
    listed: Sequence[Mapping[str, Value]],
    members: Sequence[Sequence[Value]],
    trainable: Sequence[Named],
    order: Sequence[str],
) -> dict[Value, str] | None:
    """The name behind each key; None if that cannot be told."""
    titles: dict[Value, str] = {key: key for group in members for key in group if isinstance(key, str)}
    stated = [group.get("param_names", ()) for group in listed]
    if all(isinstance(said, list) and len(said) == len(group) for said, group in zip(stated, members, strict=True)):
        pairs = (pair for said, group in zip(stated, members, strict=True) for pair in zip(group, said, strict=True))
        return dict(pairs)
    if titles:
        return titles
    numbers = [key for group in members for key in group]
    if order:
        return _by_order(numbers, keyed, trainable, order)
    runs = [Run(tuple(Slot(None, _shaped(keyed.get(key, {}))) for key in group)) for group in members]
    matches = one_way(runs, trainable)
    return None if matches is None else {members[found.run][found.start]: found.name for found in matches}


def _by_order(
    numbers: Sequence[Value],
    keyed: Mapping[Value, Mapping[str, Value]],
    trainable: Sequence[Named],
    order: Sequence[str],
) -> dict[Value, str]:
    """As the user says. Raises `BadRules` where that cannot be."""
    shapes = {one.name: one.tensor.shape for one in trainable}
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number < len(order):
            raise BadRules(f"the optimizer has a parameter {number}, but the order names {len(order)}")
        name = order[number]
        if name not in shapes:
            raise BadRules(
                f"the order says that the optimizer's parameter {number} is `{show(name)}`, which is not there"
            )
        for state, tensor in _shaped(keyed.get(number, {})).items():
            if tensor.shape and not is_state_of(state, tensor.shape, shapes[name]):
                raise BadRules(
                    f"the order says that the optimizer's parameter {number} is `{show(name)}`, of shape "
                    f"{list(shapes[name])}, but its {state} has {list(tensor.shape)}"
                )
    return {number: order[number] for number in numbers}


def _shaped(state: Mapping[str, Value]) -> dict[str, Tensor]:
    """Those states whose shapes tell of the parameter's: all but counters."""
    tensors = {str(key): tensor_leaf(value) for key, value in state.items() if isinstance(value, Leaf)}
    return {key: tensor for key, tensor in tensors.items() if key != "step"}


def _nested(
    flat: Mapping[str, Value], names: set[str]
) -> tuple[dict[Value, dict[str, Value]], list[dict[str, Value]]] | None:
    """States and groups of a flat dict; None if it speaks of a name that the model does not have.

    Parameters with the same options are one group, in the order in which the dict has them.
    """
    states: dict[Value, dict[str, Value]] = {}
    options: dict[str, dict[str, Value]] = {}
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        name = rest.rpartition(".")[0]
        while name and name not in names:  # the longest name that is known: names of states may have dots, too
            name = name.rpartition(".")[0]
        if not name:
            return None
        found = states if head == "state" else options
        found.setdefault(name, {})[rest[len(name) + 1 :]] = value
    groups: list[dict[str, Value]] = []
    alike: dict[str, dict[str, Value]] = {}
    for name, said in options.items():
        mark = json.dumps([(option, _mark(value)) for option, value in sorted(said.items())])
        if mark not in alike:
            alike[mark] = {**said, "params": []}
            groups.append(alike[mark])
        alike[mark]["params"].append(name)
    return states, groups


def _mark(value: Value) -> Value:
    return f"tensor {id(value)}" if has_tensor(value) else encode(value)


def _is_nested(value: Value) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("param_groups"), list):
        return False
    if not set(value) <= {"state", "param_groups"} or not isinstance(value.get("state", {}), dict):
        return False
    return all(isinstance(one, dict) for one in (*value["param_groups"], *value.get("state", {}).values()))
