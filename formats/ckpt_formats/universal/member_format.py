"""The universal format as a member of a chain: states that an earlier member has, too, are not stored again."""

from dataclasses import dataclass, fields

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.unchanged import EarlierMember


@dataclass(frozen=True, kw_only=True)
class ChainMember(Universal):
    """A checkpoint that is written next to earlier members of its chain."""

    unchanged: EarlierMember | None = None
    """The member with which states are compared; None: all are stored."""

    @property
    def earlier_member(self) -> EarlierMember | None:
        return self.unchanged

    def identity(self) -> object:
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "unchanged"}
        return options if self.unchanged is None else (options, self.unchanged.identity)

    def inputs(self) -> tuple[Checkpoint, ...]:
        return () if self.unchanged is None else (self.unchanged.checkpoint,)
