"""A tree of state dicts, sorted into what a checkpoint is made of."""

from dataclasses import dataclass

from ckpt_formats.core.checkpoint import Group, Origin, Parameter
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.keys import StateKeys


@dataclass(frozen=True)
class TrainingState:
    """What is in a tree of state dicts."""

    parameters: dict[str, Parameter]
    """The model's tensors with their states; also those of the extras, of the role `extra`."""
    groups: tuple[Group, ...]
    extras: dict[str, Value]
    """All the rest, by the key it had at the top level; what lay inside the model's dict by its name there."""
    aliases: dict[str, str]
    notices: tuple[Notice, ...]
    step: int | None
    keys: StateKeys
    origin: Origin | None = None
    """Who wrote it first, where our own record tells."""
