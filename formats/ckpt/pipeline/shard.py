"""Which share of a job's files one process of a job array writes: its number, given or found in the environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from ckpt.pipeline.job_arrays import KNOWN, ArrayTask, task_in
from ckpt_formats.core.arguments import Checked, Range
from ckpt_formats.core.errors import InvalidArgumentError

MAX_SHARDS = 1 << 20
_FORMS = "i/N with i from 0 to N-1, auto, or auto/N"


@dataclass(frozen=True)
class Shard(Checked):
    """The share number `number` of `count`, counted from 0. All processes of an array write one target together."""

    number: Annotated[int, Range(0, MAX_SHARDS - 1)]
    count: Annotated[int, Range(0, MAX_SHARDS)]
    command: tuple[str, ...] = ()
    """The words of the command line, which `ckpt commit` repeats to publish the target; empty if there were none."""
    is_counted: bool = False
    """Whether `count` is the size of a job array, and nobody has stated it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.number >= self.count and (self.number, self.count) != (0, 0):
            raise InvalidArgumentError(
                f"there is no shard {self.number} of {self.count}", hint="Shards are counted from 0 to N-1."
            )

    @property
    def only_commits(self) -> bool:
        """Whether this process writes no file, and only publishes what the shards have written."""
        return self.count == 0

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


COMMIT = Shard(0, 0)
"""No files, but the end: verify what all shards have read, and publish what they have written."""


def parse_shard(text: str, environment: Mapping[str, str]) -> Shard:
    """The shard that a text names: `3/8`, the fourth of eight; `auto`, what the environment of a job array says.

    `auto/N` takes only the number of this process from the environment. If its array has other than N tasks, they are
    some of N, such as those that are repeated, and each has its number among all. Raises `InvalidArgumentError`.
    """
    if match := re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", text):
        return _checked(int(match[1]), int(match[2]), text)
    match = re.fullmatch(r"auto(?:/([0-9]{1,7}))?", text)
    if match is None:
        raise InvalidArgumentError(f"{text[:60]!r} names no shard", hint=f"It is {_FORMS}.")
    task = task_in(environment)
    if task is None:
        raise InvalidArgumentError(
            "no job array is found in the environment",
            hint=f"ckpt knows those of {KNOWN}. Elsewhere, or without an array, give the number: --shard i/N.",
        )
    return replace(_of_array(task), is_counted=True) if match[1] is None else _of_some(task, int(match[1]), text)


def _of_array(task: ArrayTask) -> Shard:
    """The shard of a task, if its array is the whole job. Raises `InvalidArgumentError` where that cannot be known."""
    total, rank = task.total, task.rank
    if total is None:
        raise InvalidArgumentError(
            f"{task.scheduler} has the number of this task, {task.index}, but not how many there are",
            hint=f"Give their number: --shard auto/N. Tasks are counted from {task.lowest}.",
        )
    if task.count == 1 and task.scheduler != "srun":
        raise InvalidArgumentError(
            f"this array has one task, number {task.index}: it may be one of several that is repeated",
            hint="Give the number of all shards: --shard auto/N, or --shard i/N. Without --shard, it writes all files.",
        )
    if rank is None:
        raise InvalidArgumentError(
            f"the numbers of this array's {task.count} tasks have gaps, and {task.scheduler} does not list them; "
            f"this is number {task.index}",
            hint="If they are some tasks of N that are repeated: --shard auto/N. Else give each its number: "
            "--shard i/N.",
        )
    return _checked(rank, total, "auto")


def _of_some(task: ArrayTask, count: int, text: str) -> Shard:
    """The shard of a task, if the job has `count` of them."""
    if task.total == count and task.rank is not None:
        return _checked(task.rank, count, text)
    return _checked(task.own_number, count, text)


def _checked(number: int, count: int, text: str) -> Shard:
    if not 0 < count <= MAX_SHARDS or number >= count:
        raise InvalidArgumentError(
            f"there is no shard {number} of {count}", where=f"--shard {text}", hint="Shards are counted from 0 to N-1."
        )
    return Shard(number, count)
