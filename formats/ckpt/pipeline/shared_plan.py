"""What other processes need to write files of a plan: the job, once, and for each task the numbers of its files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.fingerprint import fingerprint
from ckpt_formats.core.format import FilePlan, Plan, WritableFormat


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """The files of a job, in every process that has it. Pickled, it is the job alone: each process plans once.

    A file with its parameters can be megabytes, its number is not; and what files share is shared by a whole plan.
    """

    source: Checkpoint
    """As the job reads it: with the names of the target."""
    format: WritableFormat
    """For this target: see `WritableFormat.for_target`."""
    digest: str
    """Of the plan of the process that began: that of every other must be the same."""

    @classmethod
    def of(cls, plan: Plan, source: Checkpoint, format: WritableFormat) -> SharedPlan:
        """That of a plan which was made of this source and format."""
        shared = cls(source, format, plan_digest(plan))
        shared.__dict__["planned"] = plan.files
        return shared

    def files(self, numbers: Iterable[int]) -> tuple[FilePlan, ...]:
        """The files with these numbers in the plan.

        Raises `UnsupportedError` if this process plans other files than the one that began.
        """
        return tuple(self.planned[number] for number in numbers)

    @cached_property
    def planned(self) -> tuple[FilePlan, ...]:
        """All files. Raises as `files`."""
        plan = self.format.plan(self.source)
        if plan_digest(plan) != self.digest:
            raise UnsupportedError(
                "this process plans other files than the one that began the job",
                where=self.source.path,
                hint="Use the same version of ckpt and of Python on all machines.",
            )
        return plan.files

    def __reduce_ex__(self, protocol: Any) -> Any:
        if protocol < 5:
            raise TypeError("a plan is pickled with protocol 5: NumPy changes the byte order of arrays in older ones")
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        return {one.name: self.__dict__[one.name] for one in fields(self)}


def plan_digest(plan: Plan) -> str:
    """A name for the files of a plan: other files, sizes or ranks have another."""
    return fingerprint([[file.file, file.nbytes, file.role, dict(file.rank)] for file in plan.files])
