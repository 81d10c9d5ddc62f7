"""Pickled optimizers: their `state_dict()`.

In a pickle, an optimizer has the parameters themselves as members of its groups and as keys of its states. They share
storages with the model's tensors, and so get their names. Source: torch/optim/optimizer.py, `state_dict`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.values import Record, Value
from ckpt_formats.state_dicts.leaves import Leaf, place


def is_pickled_optimizer(value: Value) -> bool:
    """Whether a value is an object with the attributes of an optimizer."""
    if not isinstance(value, Record) or not isinstance(value.state, dict):
        return False
    groups = value.state.get("param_groups")
    listed = isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)
    return listed and isinstance(value.state.get("state"), dict)


@dataclass(eq=False)
class PickledOptimizer:
    """A pickled optimizer. Its state dict is empty until `fill` is called with the names of the tensors."""

    record: Record
    path: str
    state_dict: dict[str, Value] = field(default_factory=dict)
    is_placed: bool = False
    """True if it is in the tree; False if only another object, such as its scheduler, refers to it."""

    @property
    def attributes(self) -> Record:
        """The attributes that its state dict omits."""
        other_attributes = {
            key: item for key, item in self.record.state.items() if key not in ("state", "param_groups")
        }
        return Record(self.record.cls, state=other_attributes or None)

    def fill(self, names: Mapping[Any, str], open_value: Callable[[Value, str], Value], where: str) -> list[Value]:
        """Fill the state dict: parameters by name if all have one, else by number, as in `state_dict()`.

        `open_value` replaces objects in a value. Returns the parameters if they have no names. Raises `CorruptError`.
        """
        groups: list[dict[Value, Value]] = self.record.state["param_groups"]
        members = {id(one): one for group in groups for one in group["params"]}
        keys: dict[int, Value] = {key: number for number, key in enumerate(members)}
        leaf_names = {key: names.get(place(one)) for key, one in members.items() if isinstance(one, Leaf)}
        is_complete = len(leaf_names) == len(members) and all(leaf_names.values())
        is_named = is_complete and len(set(leaf_names.values())) == len(leaf_names)
        if is_named:
            keys.update(leaf_names)
        stored_states = self.record.state["state"]
        states = {
            keys.get(id(key), key): open_value(state, f"{self.path}.state") for key, state in stored_states.items()
        }
        if len(states) < len(stored_states):
            raise CorruptError("two parameters of a pickled optimizer have one name", where=where)
        listed = [
            {
                **{key: open_value(option, f"{self.path}.param_groups") for key, option in group.items()},
                "params": [keys[id(one)] for one in group["params"]],
            }
            for group in groups
        ]
        self.state_dict.update(state=states, param_groups=listed)
        return [] if is_named else list(members.values())
