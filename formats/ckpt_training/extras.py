"""Values other than parameters that a load gives back: to parts of the run, to modules, to random number generators."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_training import ranks
from ckpt_training.composite_tensors import components
from ckpt_training.engines.run import TrackedRun, with_extra_states
from ckpt_training.plain_notes import OPTIMIZER_ENTRIES, extra_name, note_name
from ckpt_training.plain_values import PlainValues
from ckpt_training.random_states import restore_random_states
from ckpt_training.run_shards import composite_parameters
from ckpt_training.writing.rank_notes import RANDOM_STATES, RANK_PARTS, rank_name

_OWN = ("ckpt", RANK_PARTS)
"""Extras that ckpt itself writes about a checkpoint."""


@dataclass(frozen=True)
class RestOfExtras(Mapping[str, Any]):
    """Extras by name. A value is read when it is looked up: tensors in it become tensors of torch."""

    values_of: PlainValues
    names: Mapping[str, str]
    """The names in the checkpoint, by the names of the run."""

    def __getitem__(self, name: str) -> Any:
        return self.values_of.of(self.values_of.source.extras[self.names[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(eq=False)
class Extras:
    """The extras of a checkpoint and who takes them. Nothing is changed before `give`."""

    source: Checkpoint
    run: TrackedRun
    parts: Mapping[str, Any]
    """Objects with `load_state_dict`, by name."""
    random_states: bool
    values: PlainValues = field(init=False)
    taken: set[str] = field(default_factory=set)
    """The names of the extras that somebody takes."""

    def __post_init__(self) -> None:
        """Raise `InvalidArgumentError` or `IncompleteError` for a part that cannot be loaded."""
        self.values = PlainValues(self.source)
        for name, part in self.parts.items():
            if not hasattr(part, "load_state_dict"):
                raise InvalidArgumentError(f"`{name}` is a {type(part).__name__}, which has no load_state_dict")
            if self._stored_name(name) is None:
                names = ", ".join(sorted(self.source.extras)) or "none"
                raise IncompleteError(
                    f"the checkpoint has no state of `{name}`; it has: {names}",
                    where=self.source.path,
                    hint="Pass the part under the name that the checkpoint has, or leave it out.",
                )

    @property
    def others(self) -> "RestOfExtras":
        """The extras that nobody takes."""
        names = {note_name(name): name for name in self.source.extras if name not in self.taken and name not in _OWN}
        return RestOfExtras(self.values, names)

    def missing(self) -> list[str]:
        """The composite parameters, and the extra states of this rank's modules that say something, that it lacks."""
        modules = (name for name, one in self._modules() if _says_something(one))
        names = (*modules, *(name for name, _ in composite_parameters(self.run)))
        return [name for name in names if name not in self.source.extras]

    def unstated(self) -> list[str]:
        """What of the engine the checkpoint does not state. Raises `CkptError` if the engine could not take a value."""
        return list(self.run.unstated_notes(self._notes))

    def give(self) -> None:
        """Give all parts, modules, optimizers and generators their states."""
        self.taken.update(self._notes.names[name] for name in self.run.set_notes(self._notes))
        entries = self.source.extras.get(OPTIMIZER_ENTRIES, {})
        for number, optimizer in enumerate(self.run.optimizers):
            if number in entries:
                self._load("optimizer", OPTIMIZER_ENTRIES, partial(_add_entries, optimizer, number))
        for name, parameter in composite_parameters(self.run):
            if name in self.source.extras:
                self._load(name, name, partial(_copy_components, parameter))
        for name, module in self._modules():
            if name in self.source.extras:
                self._load(name, name, module.set_extra_state)
        for name, part in self.parts.items():
            self._load(name, self._stored_name(name) or name, part.load_state_dict)
        states = self.source.extras.get(RANDOM_STATES)
        own = rank_name(ranks.rank_and_world()[0])
        if self.random_states and isinstance(states, Mapping) and own in states:
            self._load(RANDOM_STATES, RANDOM_STATES, lambda value: restore_random_states(value[own]))

    @property
    def _notes(self) -> RestOfExtras:
        """The values that the engine itself may take."""
        names = {note_name(name): name for name in self.source.extras if note_name(name) not in self.parts}
        return RestOfExtras(self.values, names)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that take an extra state, by its name."""
        return with_extra_states(self.run, "set_extra_state")

    def _stored_name(self, part: str) -> str | None:
        """The name of the extra with the state of a part; None if there is none."""
        name = extra_name(part)
        return name if name in self.source.extras else None

    def _of_this_rank(self, stored: str) -> Any:
        """An extra: that of this rank if ranks had different ones, and there were as many as now."""
        rank, world = ranks.rank_and_world()
        of_ranks = self.source.extras.get(RANK_PARTS)
        own = of_ranks.get(rank_name(rank)) if isinstance(of_ranks, Mapping) else None
        is_own = isinstance(own, Mapping) and stored in own and self.source.origin.layout.get("world") == world
        return own[stored] if is_own else self.source.extras[stored]  # type: ignore[index]

    def _load(self, name: str, stored: str, give: Any) -> None:
        state = self.values.of(self._of_this_rank(stored))
        try:
            give(state)
        except Exception as error:  # whatever the user's object raises
            raise UnsupportedError(
                f"`{name}` does not take the state that the checkpoint has: {type(error).__name__}: {error}",
                where=self.source.path,
            ) from error
        self.taken.add(stored)


def _says_something(module: nn.Module) -> bool:
    """Has a module anything to store? Linear layers of Megatron have None, those of TE without fp8 an empty tensor."""
    if type(module).get_extra_state is nn.Module.get_extra_state:
        return False
    state = module.get_extra_state()
    return state is not None and not (isinstance(state, torch.Tensor) and not state.numel())


def _add_entries(optimizer: Any, number: int, entries: Mapping[int, Mapping[str, Any]]) -> None:
    """Load what the state dict of an optimizer has besides the states of parameters and the groups."""
    state, rest = optimizer.state_dict(), dict(entries[number])
    state["state"] = {**state["state"], **rest.pop("state", {})}
    optimizer.load_state_dict({**state, **rest})


def _copy_components(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor that consists of others into one of the same kind. Raises `ValueError` if it is of another kind."""
    pairs = [*zip(components("", parameter.detach()), components("", value), strict=False)]
    if type(parameter.detach()) is not type(value) or any(
        (to_name, to.shape, to.dtype) != (name, one.shape, one.dtype) for (to_name, to), (name, one) in pairs
    ):
        raise ValueError(f"the parameter is a {type(parameter.detach()).__name__} with other tensors in it")
    for (_, to), (_, one) in pairs:
        to.copy_(one)
