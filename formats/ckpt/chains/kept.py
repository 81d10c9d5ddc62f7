"""The members that a chain keeps when it is compacted, and how each of them is stored afterwards."""

from dataclasses import dataclass
from pathlib import Path

from ckpt.chains.append import folder_name
from ckpt_formats.universal.chain.chain_file import LoggedSteps, Member


@dataclass(frozen=True)
class KeptMember:
    """A state that stays, and how it is stored afterwards."""

    step: int
    member: Member | None
    """None if the state is in the log only."""
    how: str
    """`as it is`, `base`, `delta` or `from log`."""
    against: Member | None = None
    """Of a delta of a family that is written again: the model that becomes its parent."""


@dataclass(frozen=True)
class CompactPlan:
    """The states and segments that a chain has afterwards."""

    states: tuple[KeptMember, ...]
    segments: tuple[LoggedSteps, ...]


def unused_folder(run: Path, step: int, member: Member | None) -> Path:
    """The folder in which a member is written again: a name that the chain does not have, and that it never had.

    `member`: as it is stored now; None if it is in the log only. A copy of the chain may still have what was stored
    under its earlier names, so none of them comes back.
    """
    number = int("0" + member.folder.partition(".")[2]) if member is not None else 0
    while (run / (name := folder_name(step) + (f".{number}" if number else ""))).exists():
        number += 1
    return run / name
