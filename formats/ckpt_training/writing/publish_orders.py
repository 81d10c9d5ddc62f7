"""The orders of a trainer to the process that publishes its weights. It also takes those of saves for values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ckpt_formats.stores.location import target_path
from ckpt_training.writing.orders import End
from ckpt_training.writing.save_orders import FinishSave, WriteRuns

MODULE = "ckpt_training.writing.publish_process"
"""The module that the process runs."""
Mode = Literal["open", "start", "base", "delta"]
"""How a step is published. `open`: not at all, rank 0 only opens the chain. `start`: rank 0 reads what the chain has,
and then a base is published, unless the chain has this very state. `base`: each value alone. `delta`: against the last
published state."""
MISSED = "the rank learned too late that the step is published"
"""The reason why a rank takes no part in a step, from which rank 0 knows to announce the next one earlier."""


@dataclass(frozen=True)
class PublishSettings:
    """The first message to the process of a rank."""

    target: str
    """The published chain, or its URL."""
    rank: int
    ranks: int
    token: str
    """What all ranks of one Publisher have in common, and no other Publisher has."""
    model: str
    """The `PublishedModel` in JSON."""
    slot_nbytes: int
    slots: int
    seconds: float
    """How long to wait for another rank that makes no progress."""
    keep: str | None
    """Which steps stay in the chain; None: all."""
    folds: bool = True
    """Whether several steps are also stored as one delta."""
    signing_key: str | None = field(default=None, repr=False)
    """In hexadecimal digits."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of the model, by name: their contents as text. Of rank 0 only."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """The same by their paths."""

    @property
    def path(self) -> Path:
        """The path of the chain; that of a store shows what is there now."""
        return target_path(self.target)


@dataclass(frozen=True)
class BeginPublish:
    """Publish a step. Its values follow, and `FinishSave`. The answer is `published` or `failed`."""

    step: int
    occasion: int
    """The how-manieth step it is that may be published."""
    mode: Mode
    reason: str | None = None
    """Why this rank cannot take part in the step: nothing follows, and it only learns how the step ends."""
    attempt: int = 0
    """The how-manieth time all ranks together try a step that they had skipped."""


@dataclass(frozen=True)
class NoteOccasion:
    """The run has gone on, and this rank publishes nothing of it."""

    occasion: int


PUBLISH_ORDERS: tuple[type, ...] = (BeginPublish, NoteOccasion, WriteRuns, FinishSave, End)
