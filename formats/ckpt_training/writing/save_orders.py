"""The orders of a trainer to the process that writes its saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_formats.core.geometry import Box
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.boxes import RankBox
from ckpt_training.writing.orders import End

MODULE = "ckpt_training.writing.save_process"
"""The module that the process runs."""
_CHAIN = ".chain"


@dataclass(frozen=True)
class SaveSettings:
    """The first message to the process of a rank."""

    target: str
    """A chain, or the folder in which each save becomes a checkpoint; the URL of one of these."""
    rank: int
    ranks: int
    token: str
    """What all ranks of one Saver have in common, and no other Saver has."""
    codec: str | None
    """The codec of values that are in no delta; None: they are stored plain."""
    dcp_keys: Mapping[str, Any] | None
    """The keys of the state dicts of a DCP; None: saves are universal."""
    then: Sequence[Any] | None
    """The fields of the `ThenJob` after each published save; None: nothing follows."""
    protect: int | None
    """How many files of a save may be lost: rank 0 adds parity before it publishes. None: it adds none."""
    deltas: bool
    base_every: int | None
    """A base after so many members of a chain; None: only the first save is one."""
    check: bool
    slot_nbytes: int
    slots: int
    seconds: float
    """How long to wait for another rank that makes no progress."""
    peers: Mapping[str, Any] | None = None
    """The fields of `ckpt.holding.peers.Peers`: whose memory gets each save, too; None: nobody's."""

    @property
    def path(self) -> Path:
        """The path of the target; that of a store shows what is there now."""
        return target_path(self.target)

    @property
    def is_chain(self) -> bool:
        return self.target.rstrip("/").endswith(_CHAIN)


def is_chain(target: Path) -> bool:
    """Return whether saves become members of a chain, by the name of the target."""
    return target.name.endswith(_CHAIN)


def path_of_step(target: Path, step: int) -> Path | StorePath:
    """Return the path of the checkpoint that a save becomes."""
    return target / (name_of_member(step) if is_chain(target) else f"step-{step:08d}")


def name_of_member(step: int) -> str:
    """Return the name of the folder that a save becomes in a chain."""
    return f"step-{step:010d}"


@dataclass(frozen=True)
class BeginSave:
    """Begin a save of these boxes."""

    step: int
    boxes: Sequence[Any]
    """Rows of `row_of_box`."""
    counts: Any
    """For each parameter with an optimizer, the number of its steps, and the number of its row in `options`."""
    options: Sequence[Any]
    """The options of groups of the optimizers that are numbers, or lists of numbers."""


@dataclass(frozen=True)
class WriteRuns:
    """Write runs of values that are in a slot."""

    slot: int
    runs: Sequence[tuple[int, str, int, int, int]]
    """Of each run: the number of its box, its state, and in bytes, where it begins in both, and its length."""


@dataclass(frozen=True)
class FinishSave:
    """All values of the save were given, and the line of its `RankNotes` follows. The answer is `saved` or `failed`."""


@dataclass(frozen=True)
class DropSave:
    """This rank does not take part in a save, so no rank does. The answer is `failed`."""

    step: int
    reason: str


SAVE_ORDERS: tuple[type, ...] = (BeginSave, WriteRuns, FinishSave, DropSave, End)


def row_of_box(box: RankBox) -> list[Any]:
    """Return a box as plain data."""
    block = [list(box.block.start), list(box.block.stop)]
    return [box.parameter, box.role, list(box.shape), block, dict(box.states), box.start, box.stop]


def box_of_row(row: Sequence[Any]) -> RankBox:
    """Return the box of a row: the inverse of `row_of_box`."""
    name, role, shape, (start, stop), states, first, last = row
    return RankBox(name, role, tuple(shape), Box(tuple(start), tuple(stop)), states, first, last)
