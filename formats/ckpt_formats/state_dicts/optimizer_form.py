"""Detects optimizers' state dicts in a tree, in all forms in which scripts save them.

    {'state': {fqn: {'exp_avg': tensor, ...}}, 'param_groups': [{'lr': ..., 'params': [fqn, ...]}, ...]}
    {'state': {0: {'exp_avg': tensor, ...}},   'param_groups': [{'lr': ..., 'params': [0, ...]}, ...]}
    {'state': {'0': {...}},                    'param_groups': [{'lr': ..., 'params': [0, ...]}, ...]}
    {'state.<fqn>.exp_avg': tensor, 'param_groups.<fqn>.lr': ...}
    {fqn: {'exp_avg': tensor, ...}}            only the states

The dict of the first four forms may have further keys; the flat form may share a dict with the model.

Source: torch.optim.Optimizer.state_dict, torch.distributed.checkpoint.state_dict.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.claims import MAX_STATE_DEPTH
from ckpt_formats.core.values import StdDict, Value
from ckpt_formats.state_dicts.leaves import Leaf, has_tensor

Place: TypeAlias = tuple[Value, ...]
"""Keys of dicts and indices of lists, from the root of a tree."""
States: TypeAlias = Mapping[Value, Mapping[str, Value]]
Groups: TypeAlias = Sequence[Mapping[str, Value]]

_STATE, _GROUPS = "state", "param_groups"
_WRAPPED = "__bnb_optimizer_quant_state__"
_PREFIXES = ("", "optimizer.", "optim.")
_FULL = r"exp_avg(_sq|_diff|_slow|_fast)?(_row|_col)?|max_exp_avg_sq|exp_inf|momentum_buffer|square_avg|acc_delta"
FULL = re.compile(_FULL)
"""Names of states with the shape of their parameter, or of means over its rows or columns."""
_DISTINCT = re.compile(rf"{_FULL}|mu_product|prev_flat_grad|state[12]|qmap[12]|absmax[12]|prev_grad")
"""Names of states that no module gives to its tensors."""
OPTIMIZER_KEY = re.compile(r"(?:^|[^a-z])opt(?:im(?:i[sz]ers?)?s?)?(?:$|[^a-z])|optim|solver", re.IGNORECASE)
"""Matches keys that scripts use for optimizers."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's state dict in a tree: its place, the dict there, and which keys of this dict belong to it."""

    place: Place
    inside: Mapping[Value, Value]
    keys: tuple[Value, ...]
    prefix: str | None = None
    """The prefix of the keys of a flat one; None: it is nested."""

    @property
    def title(self) -> str:
        """Its place as text."""
        return title(self.place)

    @property
    def flat(self) -> bool:
        """Whether it is flat: one level of keys with dots."""
        return self.prefix is not None

    def content(self, names: Collection[str]) -> tuple[States, Groups] | None:
        """States and groups; None if a flat one has a key without one of these names. States alone have no groups."""
        if self.prefix is not None:
            start = len(self.prefix)
            flat = _unflatten({key[start:]: self.inside[key] for key in self.keys}, names)
            return None if flat is None else (_unwrapped(flat[0]), flat[1])
        if _GROUPS in self.keys:
            return _unwrapped(self.inside.get(_STATE) or {}), self.inside[_GROUPS]
        return _unwrapped(self.inside), ()


def _unwrapped(states: States) -> States:
    """The states without the dict in which bitsandbytes hides codes, scales and tables from FSDP.

    bitsandbytes reads them without it, too. Source: bitsandbytes/optim/optimizer.py.
    """
    if not any(str(key).startswith(_WRAPPED) for own in states.values() for key in own):
        return states
    result: dict[Value, Mapping[str, Value]] = {}
    for name, own in states.items():
        inner = own.get(_WRAPPED)
        rest = {str(key).removeprefix(f"{_WRAPPED}."): value for key, value in own.items() if key != _WRAPPED}
        result[name] = {**rest, **inner} if isinstance(inner, dict) and not rest.keys() & inner.keys() else own
        if _WRAPPED not in own:
            result[name] = rest
    return result


def title(place: Place) -> str:
    """A place in a tree as text: `optimizer_states.0`."""
    return ".".join(map(str, place))


def is_optimizer(value: Value) -> bool:
    """Whether a value is the state dict of an optimizer and nothing else, nested or flat."""
    form = _form(value, ()) if isinstance(value, dict) else None
    return form is not None and len(form.keys) == len(value) and (form.flat or _GROUPS in form.keys)


def optimizers_in(tree: Value) -> list[Optimizer]:
    """All optimizers' state dicts in a tree of dicts, lists and tuples. Each container is visited once."""
    optimizers: list[Optimizer] = []
    seen: set[int] = set()
    pending: list[tuple[Place, Value]] = [((), tree)]
    while pending:
        place, value = pending.pop()
        if id(value) in seen or len(place) > MAX_STATE_DEPTH or not isinstance(value, (dict, list, tuple)):
            continue
        seen.add(id(value))
        form = _form(value, place) if isinstance(value, dict) else None
        if form is not None:
            optimizers.append(form)
        form_keys = set() if form is None else set(form.keys)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [((*place, key), item) for key, item in items if key not in form_keys and isinstance(item, _CONTAINERS)]
        pending += reversed(inner)
    return optimizers


def without_optimizers(tree: Value, optimizers: Sequence[Optimizer]) -> Value:
    """The tree without these optimizers. Containers that become empty are removed too; in lists, None replaces them."""
    rest = _without(tree, [(one.place, one.keys) for one in optimizers])
    return {} if rest is _NOTHING else rest


_CONTAINERS = (dict, list, tuple)
_NOTHING = object()


def _without(value: Value, removed: Sequence[tuple[Place, tuple[Value, ...]]]) -> Value:
    if not removed:
        return value
    own = {key for place, keys in removed if not place for key in keys}
    below: dict[Value, list[tuple[Place, tuple[Value, ...]]]] = {}
    for place, keys in removed:
        if place:
            below.setdefault(place[0], []).append((place[1:], keys))
    items = value.items() if isinstance(value, dict) else enumerate(value)
    remaining = {key: _without(item, below.get(key, ())) for key, item in items if key not in own}
    if all(item is _NOTHING for item in remaining.values()):
        return _NOTHING
    if not isinstance(value, dict):
        return [None if item is _NOTHING else item for item in remaining.values()]
    result: dict[Value, Value] = {}
    if isinstance(value, StdDict):
        result = StdDict(value.cls, value.factory)
        result.attrs = value.attrs
    result.update((key, item) for key, item in remaining.items() if item is not _NOTHING)
    return result


def _form(value: dict[Value, Value], place: Place) -> Optimizer | None:
    if _is_nested(value):
        return Optimizer(place, value, tuple(key for key in (_STATE, _GROUPS) if key in value))
    for prefix in _PREFIXES:
        if keys := _flat_keys(value, prefix):
            return Optimizer(place, value, keys, prefix)
    return Optimizer(place, value, tuple(value)) if _is_states(value) else None


def _is_nested(value: Mapping[Value, Value]) -> bool:
    groups, states = value.get(_GROUPS), value.get(_STATE, {})
    if not isinstance(groups, list) or not isinstance(states, dict) or isinstance(states, Leaf):
        return False
    return bool(_STATE in value or len(value) == 1) and all(
        isinstance(one, dict) for one in (*groups, *states.values())
    )


def _is_states(value: Mapping[Value, Value]) -> bool:
    """Whether a value is the dict that an optimizer has under `state`, alone."""
    if not value or not all(isinstance(one, dict) for one in value.values()):
        return False
    non_empty = [one for one in value.values() if one]
    return bool(non_empty) and all(
        any(isinstance(key, str) and _DISTINCT.fullmatch(key) for key in one) for one in non_empty
    )


def _flat_keys(value: Mapping[Value, Value], prefix: str) -> tuple[str, ...]:
    """The keys of a flattened optimizer in a dict that may also contain a model."""
    states, options = f"{prefix}{_STATE}.", f"{prefix}{_GROUPS}."
    own_keys = [key for key in value if isinstance(key, str) and key.startswith((states, options))]
    state_keys = [key for key in own_keys if key.startswith(states)]
    if not state_keys or (
        len(state_keys) == len(own_keys) and not any(_DISTINCT.fullmatch(key.rpartition(".")[2]) for key in own_keys)
    ):
        return ()
    if len(own_keys) == len(value):
        return tuple(own_keys)
    names = {key for key in value if isinstance(key, str) and not key.startswith((states, options))}
    names |= {key.removeprefix("model.") for key in names} if prefix else set()
    names |= {key[len(options) :].rpartition(".")[0] for key in own_keys if key.startswith(options)}
    # A module may also be called `state`: only keys with the name of a tensor of the model are an optimizer's.
    return tuple(key for key in own_keys if _name_of(key[len(prefix) :].partition(".")[2], names))


def _name_of(rest: str, names: Collection[str]) -> str:
    """The longest known name at the beginning: names of states may contain dots too."""
    name = rest.rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def _unflatten(flat: Mapping[str, Value], names: Collection[str]) -> tuple[States, Groups] | None:
    """States and groups. Parameters with the same options become one group, in the order of the dict."""
    states: dict[Value, dict[str, Value]] = {}
    options: dict[str, dict[str, Value]] = {}
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        name = _name_of(rest, names)
        if not name:
            return None
        target = states if head == _STATE else options
        target.setdefault(name, {})[rest[len(name) + 1 :]] = value
    groups: list[dict[str, Value]] = []
    by_options: dict[str, dict[str, Value]] = {}
    for name, own_options in options.items():
        options_key = json.dumps([(option, _comparable(value)) for option, value in sorted(own_options.items())])
        if options_key not in by_options:
            by_options[options_key] = {**own_options, "params": []}
            groups.append(by_options[options_key])
        by_options[options_key]["params"].append(name)
    return states, groups


def _comparable(value: Value) -> Value:
    return f"tensor {id(value)}" if has_tensor(value) else encode(value)
