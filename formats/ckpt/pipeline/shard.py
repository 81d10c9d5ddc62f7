"""Which share of a job's files one process of a job array writes: its number, given or found in the environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_formats.core.errors import UnsupportedError

MAX_SHARDS = 1 << 20
_FORMS = "i/N with i from 0 to N-1, auto, or auto/N"


@dataclass(frozen=True)
class Shard:
    """The share number `number` of `count`, counted from 0. All processes of an array write one target together."""

    number: int
    count: int
    command: tuple[str, ...] = ()
    """The words of the command line, which `ckpt commit` repeats to publish the target; empty if there were none."""

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

    `auto/N` takes only the number from the environment. Slurm (arrays, `srun`, and both), Kubernetes (indexed jobs) and
    LSF are known. Raises `UnsupportedError`.
    """
    if match := re.fullmatch(r"(\d{1,7})/(\d{1,7})", text):
        return _checked(int(match[1]), int(match[2]), text)
    match = re.fullmatch(r"auto(?:/(\d{1,7}))?", text)
    if match is None:
        raise UnsupportedError(f"{text[:60]!r} names no shard", hint=f"It is {_FORMS}.")
    number, count = _of_environment(environment)
    if match[1] is not None:
        count = int(match[1])
    if count is None:
        raise UnsupportedError(
            f"the environment has the number of this shard, {number}, but not how many there are",
            hint="Give their number: --shard auto/N.",
        )
    return _checked(number, count, text)


def _of_environment(environment: Mapping[str, str]) -> tuple[int, int | None]:
    """The number of this process from 0 on, and how many processes there are, if it is known."""

    def number(name: str, default: int | None = None) -> int:
        value = environment.get(name, "")
        if re.fullmatch(r"\d{1,9}", value):
            return int(value)
        if default is None:
            raise UnsupportedError(f"the environment's {name} is not a number: {value[:60]!r}")
        return default

    if "SLURM_ARRAY_TASK_ID" in environment:
        step = max(number("SLURM_ARRAY_TASK_STEP", 1), 1)
        first = number("SLURM_ARRAY_TASK_MIN", 0)
        index, count = (number("SLURM_ARRAY_TASK_ID") - first) // step, number("SLURM_ARRAY_TASK_COUNT")
        # `srun` within a task of the array starts several processes.
        processes = number("SLURM_STEP_NUM_TASKS", 1)
        return (index * processes + number("SLURM_PROCID"), count * processes) if processes > 1 else (index, count)
    if "SLURM_PROCID" in environment:
        count = number("SLURM_STEP_NUM_TASKS") if "SLURM_STEP_NUM_TASKS" in environment else number("SLURM_NTASKS")
        return number("SLURM_PROCID"), count
    if "JOB_COMPLETION_INDEX" in environment:
        return number("JOB_COMPLETION_INDEX"), None
    if number("LSB_JOBINDEX", 0) > 0:
        step = max(number("LSB_JOBINDEX_STEP", 1), 1)
        last = number("LSB_JOBINDEX_END", 0)
        return (number("LSB_JOBINDEX") - 1) // step, (last - 1) // step + 1 if last else None
    raise UnsupportedError(
        "no job array is found in the environment",
        hint="Known are Slurm, Kubernetes' indexed jobs and LSF. Elsewhere give the number: --shard i/N.",
    )


def _checked(number: int, count: int, text: str) -> Shard:
    if not 0 < count <= MAX_SHARDS or number >= count:
        raise UnsupportedError(
            f"there is no shard {number} of {count}", where=f"--shard {text}", hint="Shards are counted from 0 to N-1."
        )
    return Shard(number, count)
