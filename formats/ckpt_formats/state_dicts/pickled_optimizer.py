"""Pickled optimizers: the state dict that each would have given.

A pickle has an optimizer with its parameters themselves, as members of its groups and as keys of its states. They lie
in the same storages as the model's, which names them. Source: torch/optim/optimizer.py, `state_dict`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.values import Record, Value
from ckpt_formats.state_dicts.leaves import Leaf, place


def is_pickled_optimizer(value: Value) -> bool:
    """Is it an object with the attributes of an optimizer?"""
    if not isinstance(value, Record) or not isinstance(value.state, dict):
        return False
    groups = value.state.get("param_groups")
    listed = isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)
    return listed and isinstance(value.state.get("state"), dict)


@dataclass(eq=False)
class PickledOptimizer:
    """A pickled optimizer; its state dict is filled in once all names are known."""

    record: Record
    path: str
    state_dict: dict[str, Value] = field(default_factory=dict)
    is_placed: bool = False
    """Is it in the tree, or only mentioned by another object, such as its scheduler?"""

    @property
    def attributes(self) -> Record:
        """What its state dict leaves out."""
        rest = {key: item for key, item in self.record.state.items() if key not in ("state", "param_groups")}
        return Record(self.record.cls, state=rest or None)

    def fill(self, names: Mapping[Any, str], opened: Callable[[Value, str], Value], where: str) -> list[Value]:
        """Call its parameters by name if all have one, else by number, as `state_dict()` does.

        `opened` gives a value without objects. Returns the parameters if they have no names. Raises `Corrupt`.
        """
        groups: list[dict[Value, Value]] = self.record.state["param_groups"]
        members = {id(one): one for group in groups for one in group["params"]}
        keys: dict[int, Value] = {key: number for number, key in enumerate(members)}
        known = {key: names.get(place(one)) for key, one in members.items() if isinstance(one, Leaf)}
        is_named = len(known) == len(members) and all(known.values()) and len(set(known.values())) == len(known)
        if is_named:
            keys.update(known)
        kept = self.record.state["state"]
        states = {keys.get(id(key), key): opened(state, f"{self.path}.state") for key, state in kept.items()}
        if len(states) < len(kept):
            raise Corrupt("two parameters of a pickled optimizer have one name", where=where)
        listed = [
            {
                **{key: opened(option, f"{self.path}.param_groups") for key, option in group.items()},
                "params": [keys[id(one)] for one in group["params"]],
            }
            for group in groups
        ]
        self.state_dict.update(state=states, param_groups=listed)
        return [] if is_named else list(members.values())
