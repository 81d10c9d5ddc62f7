"""The options of an optimizer's parameter groups, which a load gives back: learning rates, betas and others."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.fingerprint import fingerprint
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Value
from ckpt_training.engines.run import TrackedRun
from ckpt_training.plain_values import PlainValues

OF_THE_RUN = ("params", "foreach", "fused", "capturable", "differentiable")
"""What a group has of the run itself: its tensors, and the options that choose a kernel and no arithmetic."""


_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True, eq=False)
class StoredOptions:
    """The options of a checkpoint's parameter groups, by the parameters."""

    source: Checkpoint

    def of(self, name: str) -> Mapping[str, Value]:
        """The options of the group of a parameter; empty if no group has it."""
        number = self._groups.get(self.source.aliases.get(name, name))
        return {} if number is None else self.source.groups[number].options

    def of_group(self, number: int, names: Sequence[str], options: Collection[str] | None = None) -> dict[str, Value]:
        """The options of parameters that are one group of the run; empty if no group of the checkpoint has them.

        Args:
            number: The number of the group in the run, for messages.
            names: The parameters.
            options: Those that are needed; None: all.

        Raises `InvalidArgumentError` if the parameters had different ones.
        """
        numbers = {self._groups.get(self.source.aliases.get(name, name)) for name in names} - {None}
        stored = [self.source.groups[one].options for one in sorted(numbers)]  # type: ignore[type-var,index]
        wanted = dict.fromkeys(name for one in stored for name in one) if options is None else options
        for option in wanted:
            if len({(option in one, fingerprint(one.get(option))) for one in stored}) > 1:
                raise InvalidArgumentError(
                    f"parameter group {number} has parameters with different `{printable(option)}` in the checkpoint, "
                    f"such as `{printable(names[0])}`",
                    where=self.source.path,
                    hint="Build the optimizer with the groups that the checkpoint has.",
                )
        return dict(stored[0]) if stored else {}

    @cached_property
    def _groups(self) -> dict[str, int]:
        """The number of the group of each parameter."""
        return {name: number for number, group in enumerate(self.source.groups) for name in group.names}


@dataclass(eq=False)
class GroupOptions:
    """The stored options for each group of a run. Nothing is changed before `apply`."""

    run: TrackedRun
    source: Checkpoint
    _planned: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """The new options by optimizer and group."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgumentError` if the parameters of a group had different options."""
        stored, values = StoredOptions(self.source), PlainValues(self.source)
        for number, groups in enumerate(self.run.group_names):
            for at, names in enumerate(groups):
                if options := stored.of_group(at, names):
                    own = {name: value for name, value in options.items() if name not in OF_THE_RUN}
                    self._planned[number, at] = values.of(own)

    def unstated(self) -> list[str]:
        """The options of the run that the checkpoint does not state, so that they stay."""
        names = dict[str, None]()
        for number, groups in enumerate(self.run.group_names):
            for at in range(len(groups)):
                stored = self._planned.get((number, at), {})
                names |= dict.fromkeys(name for name in self.run.groups_of(number)[at] if name not in stored)
        return [name for name in names if name not in OF_THE_RUN]

    def after_load(self, optimizer: int, group: int) -> dict[str, Any]:
        """The options of a group as they will be."""
        return {**self.run.groups_of(optimizer)[group], **self._planned.get((optimizer, group), {})}

    def apply(self) -> None:
        """Set the options. A tensor of the run, such as a learning rate, stays the same tensor."""
        for (number, at), options in self._planned.items():
            group = self.run.groups_of(number)[at]
            for name, value in options.items():
                current = group.get(name)
                if isinstance(current, torch.Tensor):
                    new = torch.as_tensor(value)
                    group[name] = current.copy_(new) if current.shape == new.shape else new.to(current.device)
                elif isinstance(current, tuple) and isinstance(value, list):
                    group[name] = tuple(value)
                else:
                    group[name] = value


def group_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Value]:
    """The options of a group for its next step, as plain data. Tensors become arrays."""
    options = {}
    for name, value in group.items():
        if name != "params" and (plain := plain_option(value)) is not _NOT_PLAIN:
            options[name] = plain
    name = type(optimizer).__name__
    if name in ("Adam", "AdamW") and "decoupled_weight_decay" not in options:  # torch before 2.7
        options["decoupled_weight_decay"] = name == "AdamW"
    if hasattr(optimizer, "adam_w_mode"):  # DeepSpeed's groups do not state it
        options["adamw_mode"] = bool(optimizer.adam_w_mode)
    return options


_NOT_PLAIN = object()


def _array(value: torch.Tensor) -> Any:
    try:
        return value.detach().cpu().numpy().copy()
    except (TypeError, RuntimeError):
        return _NOT_PLAIN


def plain_option(value: Any) -> Any:
    """Return the value of an option as plain data; `_NOT_PLAIN` if it is none."""
    if isinstance(value, torch.Tensor):
        return value.detach().float().cpu().numpy().copy() if value.dtype == torch.bfloat16 else _array(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return value.copy()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.dtype):
        return Global("torch", str(value).removeprefix("torch."))
    if isinstance(value, dict):
        named = {key: plain_option(one) for key, one in value.items() if isinstance(key, str)}
        return _NOT_PLAIN if any(one is _NOT_PLAIN for one in named.values()) else named
    if isinstance(value, (tuple, list)):
        items = tuple(map(plain_option, value))
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    return value if isinstance(value, _PLAIN) else _NOT_PLAIN
