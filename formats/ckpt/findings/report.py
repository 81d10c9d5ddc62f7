"""What a check says: findings, and what was checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

from ckpt_formats.core.arguments import Checked, Count
from ckpt_formats.core.notices import Notice

Kind = Literal[
    "coverage",
    "header",
    "checksum",
    "values",
    "replicas",
    "copy",
    "suspicious",
    "unreadable",
    "changed",
    "log",
    "replay",
]


@dataclass(frozen=True)
class Finding(Checked):
    """A problem: its description, its file, and the tensors that it affects."""

    kind: Kind
    what: str
    where: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Report(Checked, Sequence[Finding]):
    """The result of a check of a checkpoint or a chain: a sequence of findings, empty if nothing is wrong."""

    findings: tuple[Finding, ...]
    checksums: Count = 0
    """Checksums of the files that were compared."""
    notes: tuple[Notice, ...] = ()
    """What the user should know, and what is no error."""
    bad_steps: tuple[int, ...] = ()
    """Of a chain: the steps that cannot be restored, because they depend on damaged bytes."""

    @property
    def ok(self) -> bool:
        """Is nothing wrong?"""
        return not self.findings

    def __eq__(self, other: object) -> bool:
        """Whether it is the same report, or a list or tuple of the same findings."""
        if isinstance(other, Report):
            return self is other
        return isinstance(other, (list, tuple)) and list(self.findings) == list(other)

    __hash__ = object.__hash__

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...

    def __getitem__(self, index: int | slice) -> Finding | tuple[Finding, ...]:
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)
