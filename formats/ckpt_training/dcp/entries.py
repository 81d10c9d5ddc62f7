"""What each key of a state dict for `torch.distributed.checkpoint` means in a checkpoint, whatever trainer built it.

DCP joins the path of a value by dots. Trainers use different paths for the same value:

    model.<name>, app.model.<name>, <name>         a weight, with any prefix or none
    optim.state.<name>.<state>, state.<name>.…     a state of the optimizer, nested or flat
    optim.param_groups.<number>.<option>           an option of a parameter group
    optimizer.param_groups.<name>.<option>         the same, flat (`flatten_optimizer_state_dict`, TorchTitan)
    lr_scheduler.last_epoch                        an extra, or a value in one
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np

from ckpt_formats.core.checkpoint import MASTER, Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.nesting import flattened
from ckpt_formats.state_dicts.extras import tensors_for_names
from ckpt_formats.state_dicts.record import KEY
from ckpt_training.group_options import StoredOptions

PARAMS = "params"
"""The option of a parameter group that lists its parameters."""
_STATE, _GROUPS, _COUNT = "state.", "param_groups.", "step"


@dataclass(frozen=True)
class ModelWeight:
    """The weight of a parameter."""

    name: str
    """The parameter's name in the checkpoint, without ties."""
    prefix: str
    """What the key has before the name."""


@dataclass(frozen=True)
class OptimizerState:
    """A state of a parameter, other than its weights: a tensor, or a plain value."""

    name: str
    state: str


@dataclass(frozen=True)
class GroupOption:
    """An option of a parameter group."""

    group: int | str
    """The number of the group in the state dict; or the name of a parameter, if the optimizer is flat."""
    option: str
    prefix: str
    """What the key has before `param_groups`."""


@dataclass(frozen=True)
class ExtraValue:
    """A value, or a tensor, that belongs to no parameter."""

    name: str


Entry: TypeAlias = ModelWeight | OptimizerState | GroupOption | ExtraValue


@dataclass(frozen=True, eq=False)
class StoredEntries:
    """The values of a checkpoint, by the keys of state dicts."""

    source: Checkpoint
    _by_key: dict[str, Entry | None] = field(default_factory=dict)

    def find(self, key: str) -> Entry | None:
        """What a key means. Of several meanings, the one with the shortest prefix. None if the checkpoint has none."""
        if key not in self._by_key:
            self._by_key[key] = next(self._meanings(key), None)
        return self._by_key[key]

    def value(self, entry: Entry) -> Tensor | Value:
        """A tensor, or the plain value, of an entry. An option is that of the stored group of this number."""
        if isinstance(entry, ModelWeight):
            states = self.source.parameters[entry.name].states
            return states.get(MASTER, self.source.parameters[entry.name].weight)
        if isinstance(entry, OptimizerState):
            return self._state(self.source.parameters[entry.name], entry.state)
        if isinstance(entry, ExtraValue):
            return self.extras[entry.name]
        if isinstance(entry.group, str):
            return self.options.of(entry.group).get(entry.option)
        group = self.source.groups[entry.group] if entry.group < len(self.source.groups) else None
        if group is None:
            return None
        return list(group.names) if entry.option == PARAMS else group.options.get(entry.option)

    @cached_property
    def options(self) -> StoredOptions:
        """The options of the checkpoint's groups."""
        return StoredOptions(self.source)

    @cached_property
    def extras(self) -> dict[str, Value]:
        """The extras, flattened as DCP flattens them: the leaves by their names. Tensors are `Tensor`s.

        An extra that DCP cannot flatten, because two values would have one name, is left out.
        """
        leaves: dict[str, Value] = {}
        for key, value in self.source.extras.items():
            with suppress(UnsupportedError):
                own = {key: tensors_for_names(value, self.source.parameters)} if key != KEY else {}
                leaves = {name: leaf for name, _, leaf in flattened(own)} | leaves
        return leaves

    def _meanings(self, key: str) -> Iterator[Entry]:
        for start in (0, *(at + 1 for at, character in enumerate(key) if character == ".")):
            prefix, rest = key[:start], key[start:]
            if (parameter := self._parameter(rest)) is not None:
                yield ModelWeight(parameter.name, prefix)
            if rest.startswith(_STATE):
                yield from self._states(rest[len(_STATE) :])
            if rest.startswith(_GROUPS):
                yield from self._options(rest[len(_GROUPS) :], prefix)
            if rest in self.extras:
                yield ExtraValue(rest)

    def _parameter(self, name: str) -> Parameter | None:
        parameter = self.source.parameters.get(self.source.aliases.get(name, name))
        return None if parameter is None or parameter.role == "extra" else parameter

    def _states(self, rest: str) -> Iterator[OptimizerState]:
        for name, state in _splits(rest):
            parameter = self._parameter(name)
            if parameter is None:
                continue
            own = from_stored(state)
            if own in parameter.states or state in parameter.values:
                yield OptimizerState(parameter.name, own if own in parameter.states else state)

    def _options(self, rest: str, prefix: str) -> Iterator[GroupOption]:
        number, _, option = rest.partition(".")
        is_number = number.isascii() and number.isdigit() and len(number) < 10 and bool(self.source.groups)
        if is_number and "." not in option:
            yield GroupOption(int(number), option, prefix)
        for name, of_name in _splits(rest):
            if self._parameter(name) is not None and self.options.of(name):
                yield GroupOption(name, of_name, prefix)
        if is_number and "." in option:  # names may begin with a number, too: `0.weight.lr`
            yield GroupOption(int(number), option, prefix)

    def _state(self, parameter: Parameter, state: str) -> Tensor | Value:
        if state in parameter.states:
            return parameter.states[state]
        value = parameter.values[state]
        if state == _COUNT and type(value) in (int, float):  # torch has it as a tensor
            return Tensor.of(ArrayBlob(np.asarray(value, DTYPES["float32"])))
        return value


def _splits(text: str) -> Iterator[tuple[str, str]]:
    """All pairs that a dot separates, the longest first part first: names of states may have dots, too."""
    at = text.rfind(".")
    while at > 0:
        yield text[:at], text[at + 1 :]
        at = text.rfind(".", 0, at)
