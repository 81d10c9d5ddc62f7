"""What an optimizer's state dict looks like, in every form in which people save one.

    {'state': {fqn: {'exp_avg': tensor, ...}}, 'param_groups': [{'lr': ..., 'params': [fqn, ...]}, ...]}
    {'state': {0: {'exp_avg': tensor, ...}},   'param_groups': [{'lr': ..., 'params': [0, ...]}, ...]}
    {'state': {'0': {...}},                    'param_groups': [{'lr': ..., 'params': [0, ...]}, ...]}
    {'state.<fqn>.exp_avg': tensor, 'param_groups.<fqn>.lr': ...}
    {fqn: {'exp_avg': tensor, ...}}            the states alone

The first four may have other keys beside them; the flat form may lie in one dict with the model.

Source: torch.optim.Optimizer.state_dict, torch.distributed.checkpoint.state_dict.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.values import StdDict, Value
from ckpt_formats.state_dicts.leaves import Leaf, has_tensor

Place: TypeAlias = tuple[Value, ...]
"""Keys of dicts and places in lists, from the root of a tree on."""
States: TypeAlias = Mapping[Value, Mapping[str, Value]]
Groups: TypeAlias = Sequence[Mapping[str, Value]]

_STATE, _GROUPS = "state", "param_groups"
_PREFIXES = ("", "optimizer.", "optim.")
_MAX_DEPTH = 50
_FULL = r"exp_avg(_sq|_diff|_slow|_fast)?(_row|_col)?|max_exp_avg_sq|exp_inf|momentum_buffer|square_avg|acc_delta"
FULL = re.compile(_FULL)
"""States that have the shape of their parameter, or are means of such over its rows or columns."""
_DISTINCT = re.compile(rf"{_FULL}|mu_product|prev_flat_grad|state[12]|qmap[12]|absmax[12]|prev_grad")
"""Names of states that no module gives to its tensors."""
CALLED = re.compile(r"(?:^|[^a-z])opt(?:im(?:i[sz]ers?)?s?)?(?:$|[^a-z])|optim|solver", re.IGNORECASE)
"""Finds keys that people give to optimizers."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's state dict in a tree: where it is, and which keys of the dict there are its own."""

    place: Place
    inside: Mapping[Value, Value]
    keys: tuple[Value, ...]
    prefix: str | None = None
    """Of the keys of a flat one; None: it is nested."""

    @property
    def title(self) -> str:
        return title(self.place)

    @property
    def flat(self) -> bool:
        return self.prefix is not None

    def content(self, names: Collection[str]) -> tuple[States, Groups] | None:
        """States and groups; None if a flat one speaks of a name that is none of these. States alone have no groups."""
        if self.prefix is not None:
            cut = len(self.prefix)
            return _unflattened({key[cut:]: self.inside[key] for key in self.keys}, names)
        if _GROUPS in self.keys:
            return self.inside.get(_STATE) or {}, self.inside[_GROUPS]
        return self.inside, ()


def title(place: Place) -> str:
    """The place of something in a tree, in words: `optimizer_states.0`."""
    return ".".join(map(str, place))


def is_optimizer(value: Value) -> bool:
    """Is it the state dict of an optimizer and nothing else, nested or flat?"""
    found = _form(value, ()) if isinstance(value, dict) else None
    return found is not None and len(found.keys) == len(value) and (found.flat or _GROUPS in found.keys)


def optimizers_in(tree: Value) -> list[Optimizer]:
    """Every optimizer's state dict in a tree of dicts, lists and tuples. Each container is looked at once."""
    found: list[Optimizer] = []
    seen: set[int] = set()
    waiting: list[tuple[Place, Value]] = [((), tree)]
    while waiting:
        place, value = waiting.pop()
        if id(value) in seen or len(place) > _MAX_DEPTH or not isinstance(value, (dict, list, tuple)):
            continue
        seen.add(id(value))
        own = _form(value, place) if isinstance(value, dict) else None
        if own is not None:
            found.append(own)
        taken = set() if own is None else set(own.keys)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [((*place, key), item) for key, item in items if key not in taken and isinstance(item, _CONTAINERS)]
        waiting += reversed(inner)
    return found


def without_optimizers(tree: Value, optimizers: Sequence[Optimizer]) -> Value:
    """The tree without these. What held nothing else goes, too; in lists, None stands in the place."""
    kept = _without(tree, [(one.place, one.keys) for one in optimizers])
    return {} if kept is _NOTHING else kept


_CONTAINERS = (dict, list, tuple)
_NOTHING = object()


def _without(value: Value, taken: Sequence[tuple[Place, tuple[Value, ...]]]) -> Value:
    if not taken:
        return value
    own = {key for place, keys in taken if not place for key in keys}
    below: dict[Value, list[tuple[Place, tuple[Value, ...]]]] = {}
    for place, keys in taken:
        if place:
            below.setdefault(place[0], []).append((place[1:], keys))
    items = value.items() if isinstance(value, dict) else enumerate(value)
    kept = {key: _without(item, below.get(key, ())) for key, item in items if key not in own}
    if all(item is _NOTHING for item in kept.values()):
        return _NOTHING
    if not isinstance(value, dict):
        return [None if item is _NOTHING else item for item in kept.values()]
    made: dict[Value, Value] = {}
    if isinstance(value, StdDict):
        made = StdDict(value.cls, value.factory)
        made.attrs = value.attrs
    made.update((key, item) for key, item in kept.items() if item is not _NOTHING)
    return made


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
    """Is it what an optimizer keeps under `state`, alone?"""
    if not value or not all(isinstance(one, dict) for one in value.values()):
        return False
    kept = [one for one in value.values() if one]
    return bool(kept) and all(any(isinstance(key, str) and _DISTINCT.fullmatch(key) for key in one) for one in kept)


def _flat_keys(value: Mapping[Value, Value], prefix: str) -> tuple[str, ...]:
    """The keys that are a flattened optimizer's, where the dict may hold a model, too."""
    states, options = f"{prefix}{_STATE}.", f"{prefix}{_GROUPS}."
    own = [key for key in value if isinstance(key, str) and key.startswith((states, options))]
    kept = [key for key in own if key.startswith(states)]
    if not kept or (len(kept) == len(own) and not any(_DISTINCT.fullmatch(key.rpartition(".")[2]) for key in own)):
        return ()
    if len(own) == len(value):
        return tuple(own)
    names = {key for key in value if isinstance(key, str) and not key.startswith((states, options))}
    names |= {key.removeprefix("model.") for key in names} if prefix else set()
    names |= {key[len(options) :].rpartition(".")[0] for key in own if key.startswith(options)}
    # A module may be called `state`, too: only what speaks of a tensor of the model is an optimizer's.
    return tuple(key for key in own if _name_of(key[len(prefix) :].partition(".")[2], names))


def _name_of(rest: str, names: Collection[str]) -> str:
    """The longest known name at the front: names of states may have dots, too."""
    name = rest.rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def _unflattened(flat: Mapping[str, Value], names: Collection[str]) -> tuple[States, Groups] | None:
    """Parameters with the same options are one group, in the order in which the dict has them."""
    states: dict[Value, dict[str, Value]] = {}
    options: dict[str, dict[str, Value]] = {}
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        name = _name_of(rest, names)
        if not name:
            return None
        found = states if head == _STATE else options
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
