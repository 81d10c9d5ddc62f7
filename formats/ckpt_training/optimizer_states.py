"""The states of live optimizers: which ones they keep, which of them a checkpoint has, and the memory for them."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.reading import Reading
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.state_names import from_stored, to_stored
from ckpt_formats.core.tensor import Tensor
from ckpt_training.composite_tensors import is_value
from ckpt_training.engines.run import TrackedRun
from ckpt_training.group_options import GroupOptions
from ckpt_training.local_shards import LocalShard, local_shard, shard_of
from ckpt_training.matching import Matching
from ckpt_training.plain_values import PlainValues

_COUNT = "step"
_COUNTING_IN_GROUPS = ("apex.optimizers.", "transformer_engine.")
"""The packages whose optimizers count the steps of a group, not of each tensor."""
_COUNTING_IN_NUMBERS = ("bitsandbytes.", "deepspeed.ops.")
"""The packages whose optimizers count in numbers of Python."""
_SIDE = 3
"""The length of each axis of a probed tensor."""


class ExpectedState(NamedTuple):
    """What an optimizer keeps under a name."""

    is_elementwise: bool
    """Has it one element for each of the tensor's?"""
    value: Any
    """A tensor or a value of the same kind: its dtype and device count."""


@dataclass(frozen=True, eq=False)
class PlannedState:
    """A state of a tracked tensor that a load creates or fills."""

    number: int
    """The number of the tensor in the run."""
    key: str
    """The optimizer's name for the state."""
    parts: tuple[Tensor | None, ...] = ()
    """The stored values of each part of the tensor."""
    dtype: torch.dtype | None = None
    """The dtype of the state; None: it has no element for each of the tensor's, and becomes `value`."""
    value: Any = None


@dataclass(eq=False)
class StatePlan:
    """The states of a run's optimizers that a checkpoint has. Nothing is changed before `create`.

    An optimizer gets no state that the checkpoint lacks: it makes such a state itself, as it does at its first step.
    """

    run: TrackedRun
    matching: Matching
    groups: GroupOptions
    values: PlainValues
    fresh: dict[str, None] = field(default_factory=dict)
    """Parameters of which the checkpoint has no state, although it has an optimizer: they were not stepped yet."""
    skipped: dict[str, None] = field(default_factory=dict)
    """Stored states that the optimizer keeps of other tensors only."""
    unused: dict[str, None] = field(default_factory=dict)
    """Stored states that no optimizer of the run keeps."""
    read: list[Tensor] = field(default_factory=list)
    """Stored states that were read to plan: their checksums are not compared yet."""
    _planned: list[PlannedState] = field(default_factory=list)
    _dropped: list[tuple[int, str | None]] = field(default_factory=list)
    """States that the run had not at that step, by the number of the tensor and the key; None: all."""
    _counts_of_groups: dict[tuple[int, int], int] = field(default_factory=dict)
    """The number of steps of each group that counts them, by optimizer and group."""
    _probed: dict[tuple[Any, ...], Mapping[str, ExpectedState] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source, in_use = self.matching.source, set[str]()
        has_optimizer = bool(source.groups) or any(_names_of_states(one) for one in source.parameters.values())
        for number in range(len(self.run.tensors)):
            planned = list(self._of_tensor(number, has_optimizer))
            in_use.update(one.key for one in planned)
            self._planned += planned
        self.unused = {label: None for label in self.skipped if _key_of(label) not in in_use}
        self.skipped = {label: None for label in self.skipped if label not in self.unused}

    def create(self) -> Iterator[tuple[LocalShard, Tensor]]:
        """Create the states, and yield the memory of those that are to be filled, with their stored values."""
        for number, key in self._dropped:
            tracked = self.run.tensors[number]
            states = self.run.optimizers[tracked.optimizer].state
            if key is None:
                states.pop(tracked.tensor, None)
            elif tracked.tensor in states:
                states[tracked.tensor].pop(key, None)
        for (number, at), count in self._counts_of_groups.items():
            group = self.run.groups_of(number)[at]
            if isinstance(group.get(_COUNT), torch.Tensor):
                group[_COUNT].fill_(count)
            else:
                group[_COUNT] = count
        for one in self._planned:
            tracked = self.run.tensors[one.number]
            state = self.run.optimizers[tracked.optimizer].state[tracked.tensor]
            if one.dtype is None:
                state[one.key] = one.value
                continue
            current, own_parts = state.get(one.key), self.run.state_parts(one.number, one.key)
            like = tracked.tensor.detach()
            if own_parts is not None:
                like = like.new_empty(sum(part.size for part in own_parts))
            parts = list(zip(tracked.all_parts if own_parts is None else own_parts, one.parts, strict=False))
            if not isinstance(current, torch.Tensor) or current.shape != like.shape:
                # Zeros, unless all is read: a flat vector has padding that no part fills.
                is_read = sum(part.size for part, stored in parts if stored is not None) == local_shard(like).numel()
                create = torch.empty_like if is_read else torch.zeros_like
                state[one.key] = current = create(like, dtype=one.dtype)
            values = local_shard(current).detach()
            for part, stored in parts:
                if stored is not None:
                    yield shard_of(values, part, from_stored(one.key), "parameter"), stored

    def _of_tensor(self, number: int, has_optimizer: bool) -> Iterator[PlannedState]:
        tracked = self.run.tensors[number]
        names = list(dict.fromkeys(part.name for part in tracked.all_parts)) or list(tracked.names)
        if not names:
            return
        stored = [one for name in names for one in self.matching.parameters(name)]
        in_source = {name for one in stored for name in _names_of_states(one)}
        if not in_source and (not stored or has_optimizer):
            self.fresh |= dict.fromkeys(one.name for one in stored)
            self._dropped.append((number, None))
            return
        if self._module_of(number).startswith(_COUNTING_IN_GROUPS):
            self._count_group(number, stored)
        forms = self._forms_of(number, in_source)
        if forms is None:
            keys = {to_stored(name): name for name in sorted(in_source)}
        else:
            keys = {key: from_stored(key) for key in forms}
            self.skipped |= {_label(names[0], name): None for name in sorted(in_source - {*keys.values(), _COUNT})}
            existing = self.run.optimizers[tracked.optimizer].state.get(tracked.tensor, {})
            self._dropped += [(number, str(key)) for key in existing if str(key) not in forms]
        for key, name in keys.items():
            yield from self._state(number, names, stored, key, name, None if forms is None else forms[key])

    def _state(
        self, number: int, names: list[str], stored: list[Parameter], key: str, name: str, form: ExpectedState | None
    ) -> Iterator[PlannedState]:
        """A state by its name in the optimizer and in the library. `form`: None if the optimizer is not known."""
        if key == _COUNT:
            count, package = self._count_of(number, stored), self._module_of(number)
            if count is None and form is not None:
                self.matching.mismatches.missing[_label(names[0], name)] = None
            elif count is not None and not package.startswith(_COUNTING_IN_GROUPS):
                in_number = form is None and package.startswith(_COUNTING_IN_NUMBERS)
                yield PlannedState(number, key, value=int(count) if in_number else _count_like(form, count))
            return
        first = stored[0] if stored else None
        in_states = first is not None and name in first.states
        if first is not None and is_value(first.values.get(name)):  # a tensor that consists of others
            yield PlannedState(number, key, value=self.values.of(first.values[name]))
            return
        if form.is_elementwise if form is not None else in_states and stored[0].states[name].shape == stored[0].shape:
            tracked = self.run.tensors[number]
            dtype = form.value.dtype if form is not None else _torch_dtype(stored[0].states[name])
            own_parts = self.run.state_parts(number, key)
            every = tracked.all_parts if own_parts is None else own_parts
            parts = tuple(self.matching.values(part, name, dtype) for part in every)
            if any(one is not None for one in parts) or (not parts and in_states):
                yield PlannedState(number, key, parts, dtype)
        elif first is not None and (in_states or name in first.values):
            yield PlannedState(number, key, value=self._whole(number, first, name, form))
        else:
            self.matching.mismatches.missing[_label(names[0], name)] = None

    def _module_of(self, number: int) -> str:
        """The module of the class of a tensor's optimizer."""
        return type(self.run.optimizers[self.run.tensors[number].optimizer]).__module__

    def _count_of(self, number: int, stored: list[Parameter]) -> int | float | None:
        """The number of steps of a tensor. Raises `UnsupportedError` if its parameters had different ones."""
        counts = {count for one in stored if (count := one.count) is not None}
        if len(counts) > 1:
            raise UnsupportedError(
                f"the tensor with `{stored[0].name}` is stepped as one, but its parameters had {sorted(counts)} steps",
                hint="To load weights alone, pass ckpt.open(source).weights_only() as the source.",
            )
        return counts.pop() if counts else None

    def _count_group(self, number: int, stored: list[Parameter]) -> None:
        """Note the number of steps of a group that counts them. Raises `UnsupportedError` as `_count_of`."""
        count, tracked = self._count_of(number, stored), self.run.tensors[number]
        if count is None:
            return
        if self._counts_of_groups.setdefault((tracked.optimizer, tracked.group), int(count)) != count:
            raise UnsupportedError(
                f"the optimizer counts the steps of a group, but `{stored[0].name}` had other steps than parameters "
                "before it",
                hint="To load weights alone, pass ckpt.open(source).weights_only() as the source.",
            )

    def _whole(self, number: int, stored: Parameter, name: str, form: ExpectedState | None) -> Any:
        """A state that has another shape than its tensor, or is no tensor."""
        if name in stored.values:
            return _like(form, self.values.of(stored.values[name]))
        tensor, tracked = stored.states[name], self.run.tensors[number]
        has_all = (
            len(tracked.all_parts) == 1 and tracked.all_parts[0].size == tracked.tensor.numel() == stored.weight.size
        )
        if tensor.shape and not has_all:
            raise UnsupportedError(
                f"the state {name} has its own shape {list(tensor.shape)}, and the parameter is sharded",
                where=stored.name,
                hint="Load into an unsharded optimizer, or load without the optimizer.",
            )
        self.read.append(tensor)
        values = tensor.torch()
        return _like(form, values) if form is not None else values.to(tracked.tensor.device)

    def _forms_of(self, number: int, in_source: Collection[str]) -> Mapping[str, ExpectedState] | None:
        """What the optimizer keeps of a tensor, under the stored options of its group; None if that is not known.

        `in_source`: the states that the checkpoint has of it.
        """
        tracked = self.run.tensors[number]
        optimizer = self.run.optimizers[tracked.optimizer]
        existing = {
            str(key): ExpectedState(
                isinstance(one, torch.Tensor)
                and one.dim() > 0
                and (one.shape == tracked.tensor.shape or self.run.state_parts(number, str(key)) is not None),
                one,
            )
            for key, one in optimizer.state.get(tracked.tensor, {}).items()
            if one is not None or from_stored(str(key)) in in_source
        }
        if not type(optimizer).__module__.startswith("torch.optim."):
            return existing or None
        tensor = local_shard(tracked.tensor)
        key = (tracked.optimizer, tracked.group, tensor.dtype, tensor.dim(), tensor.device)
        if key not in self._probed:
            options = self.groups.after_load(tracked.optimizer, tracked.group)
            self._probed[key] = _forms_after_a_step(optimizer, options, tensor)
        probed = self._probed[key]
        if probed is None:
            return existing or None
        own = {name: form for name, form in existing.items() if from_stored(name) in in_source}  # put there by the user
        return {**own, **{name: existing.get(name, form) for name, form in probed.items()}}


def with_counts(source: Checkpoint, names: Iterable[str], reading: Reading) -> Checkpoint:
    """The checkpoint with the counts of steps of these parameters as plain values, all of which are read at once.

    Many formats store each as a tensor of one element.
    """
    wanted = dict.fromkeys(source.aliases.get(name, name) for name in names)
    counted = {
        name: (parameter, np.empty(parameter.states[_COUNT].shape, parameter.states[_COUNT].dtype))
        for name in wanted
        if (parameter := source.parameters.get(name)) is not None
        and parameter.values.get(_COUNT) is None
        and _COUNT in parameter.states
        and parameter.states[_COUNT].size == 1
    }
    reading.fill((parameter.states[_COUNT], array) for parameter, array in counted.values())
    changed = {}
    for name, (parameter, array) in counted.items():
        count = int(array.item()) if array.dtype.kind in "iu" else float(array.item())
        changed[name] = replace(parameter, values={**parameter.values, _COUNT: count})
    return replace(source, parameters={**source.parameters, **changed}) if changed else source


def _forms_after_a_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], tensor: torch.Tensor
) -> Mapping[str, ExpectedState] | None:
    """What an optimizer of torch keeps after the first step of a tensor like this one; None if it cannot step.

    A copy of the optimizer steps a tensor of its own, so the optimizer and its hooks do not notice.
    """
    parameter = torch.nn.Parameter(torch.zeros((_SIDE,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device))
    parameter.grad = torch.zeros_like(parameter)
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": [parameter]}]
    with suppress(Exception), torch.no_grad():
        inspect.unwrap(type(optimizer).step)(twin)
        return {
            str(key): ExpectedState(_is_elementwise(str(key), one, parameter), one)
            for key, one in twin.state[parameter].items()
            if one is not None
        }
    return None


def _is_elementwise(key: str, value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and key != _COUNT


def _names_of_states(parameter: Parameter) -> set[str]:
    """The names of the states that an optimizer has of a parameter."""
    return {name for name in (*parameter.states, *parameter.values) if name not in (MODEL, MASTER)}


def _label(name: str, state: str) -> str:
    return f"{name} ({state})"


def _key_of(label: str) -> str:
    """The optimizer's name of the state of a label."""
    return to_stored(label.rpartition("(")[2].removesuffix(")"))


def _count_like(form: ExpectedState | None, count: float) -> Any:
    """A number of steps as the optimizer has it. If it is not known, as torch's own optimizers do."""
    return torch.tensor(float(count)) if form is None else _like(form, count)


def _like(form: ExpectedState | None, value: Any) -> Any:
    """A value as the optimizer has it: a tensor of the form's dtype on its device, or a plain number."""
    kind = None if form is None else form.value
    if isinstance(kind, torch.Tensor):
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
        tensor = tensor.to(kind.device, kind.dtype)
        return tensor.reshape(kind.shape) if tensor.numel() == kind.numel() else tensor
    if isinstance(kind, (int, float)) and not isinstance(kind, bool) and not isinstance(value, bool):
        return type(kind)(value)
    return value


def _torch_dtype(tensor: Tensor) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"torch has no type {tensor.dtype.name}")
    return dtype
