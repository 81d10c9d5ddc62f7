"""The parts of a tree of state dicts."""

from dataclasses import dataclass

from ckpt_formats.core.checkpoint import Group, Origin, Parameter
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.keys import StateKeys


@dataclass(frozen=True)
class TrainingState:
    """A tree of state dicts, split into parameters, groups and extras."""

    parameters: dict[str, Parameter]
    """The model's tensors with their states, and the tensors of the extras, with the role `extra`."""
    groups: tuple[Group, ...]
    extras: dict[str, Value]
    """All other entries, by their key at the top level, or by their name inside the model's dict."""
    aliases: dict[str, str]
    notices: tuple[Notice, ...]
    step: int | None
    keys: StateKeys
    origin: Origin | None = None
    """The engine that wrote the checkpoint first, if a record of ckpt states it."""
