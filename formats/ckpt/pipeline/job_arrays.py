"""What the environment says of a job array, by the scheduler that has started this process."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import InvalidArgumentError

_MAX_AD = 1 << 20


@dataclass(frozen=True)
class ArrayTask:
    """One task of a job array, as its scheduler counts: it has the number `index`, and `first`, `first + step`, … are
    those of the others."""

    scheduler: str
    index: int
    first: int = 0
    step: int = 1
    count: int | None = None
    """How many tasks the array has; None if the scheduler does not say."""
    has_gaps: bool = False
    """Whether the array is a list, such as 1,3,6."""
    lowest: int = 0
    """The number of the first task in an array of all: where users of the scheduler begin to count."""
    processes: int = 1
    """The processes of each task, of which this is the number `process`."""
    process: int = 0

    @property
    def total(self) -> int | None:
        """How many processes the array has."""
        return None if self.count is None else self.count * self.processes

    @property
    def rank(self) -> int | None:
        """The number of this process, from 0, among those of the array; None if the array has gaps.

        Schedulers state the first, the last and the number of tasks, but no list: with gaps, nobody knows how many
        tasks come before this one.
        """
        before, rest = divmod(self.index - self.first, self.step)
        if self.has_gaps or rest or before < 0 or (self.count is not None and before >= self.count):
            return None
        return before * self.processes + self.process

    @property
    def own_number(self) -> int:
        """The number of this process if the tasks of the array are some of all, and have kept their numbers."""
        return (self.index - self.lowest) * self.processes + self.process


def task_in(environment: Mapping[str, str]) -> ArrayTask | None:
    """The task of an array that this process is; None if it is none. Raises `InvalidArgumentError`."""
    return next((task for scheduler in _SCHEDULERS if (task := scheduler(environment)) is not None), None)


KNOWN = "Slurm, Kubernetes' indexed jobs, LSF, PBS, Grid Engine and HTCondor"


def _slurm(environment: Mapping[str, str]) -> ArrayTask | None:
    processes = _number(environment, "SLURM_STEP_NUM_TASKS", 1)
    process = _number(environment, "SLURM_PROCID", 0) if processes > 1 else 0
    if "SLURM_ARRAY_TASK_ID" in environment:
        first, count = _number(environment, "SLURM_ARRAY_TASK_MIN", 0), _number(environment, "SLURM_ARRAY_TASK_COUNT")
        step = max(_number(environment, "SLURM_ARRAY_TASK_STEP", 1), 1)
        last = _number(environment, "SLURM_ARRAY_TASK_MAX", first + step * (count - 1))
        index, has_gaps = _number(environment, "SLURM_ARRAY_TASK_ID"), last != first + step * (count - 1)
        return ArrayTask("Slurm", index, first, step, count, has_gaps, processes=processes, process=process)
    if "SLURM_STEP_NUM_TASKS" in environment:
        return ArrayTask("srun", _number(environment, "SLURM_PROCID"), count=processes)
    if "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
        return ArrayTask("srun", _number(environment, "SLURM_PROCID"), count=_number(environment, "SLURM_NTASKS"))
    return None


def _kubernetes(environment: Mapping[str, str]) -> ArrayTask | None:
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    return ArrayTask("Kubernetes", _number(environment, "JOB_COMPLETION_INDEX"))


def _lsf(environment: Mapping[str, str]) -> ArrayTask | None:
    index = _number(environment, "LSB_JOBINDEX", 0)
    if index == 0:  # LSF sets it for every job
        return None
    step = max(_number(environment, "LSB_JOBINDEX_STEP", 1), 1)
    last = _number(environment, "LSB_JOBINDEX_END", 0)
    return ArrayTask("LSF", index, 1, step, (last - 1) // step + 1 if last else None, lowest=1)


def _pbs(environment: Mapping[str, str]) -> ArrayTask | None:
    name = next((name for name in ("PBS_ARRAY_INDEX", "PBS_ARRAYID") if environment.get(name)), None)
    return None if name is None else ArrayTask("PBS", _number(environment, name))


def _grid_engine(environment: Mapping[str, str]) -> ArrayTask | None:
    if environment.get("SGE_TASK_ID", "undefined") == "undefined":
        return None
    first, last = _number(environment, "SGE_TASK_FIRST"), _number(environment, "SGE_TASK_LAST")
    step = max(_number(environment, "SGE_TASK_STEPSIZE", 1), 1)
    count = (last - first) // step + 1
    return ArrayTask("Grid Engine", _number(environment, "SGE_TASK_ID"), first, step, count, lowest=1)


def _condor(environment: Mapping[str, str]) -> ArrayTask | None:
    if "_CONDOR_NPROCS" in environment:  # of the parallel universe
        return ArrayTask(
            "HTCondor", _number(environment, "_CONDOR_PROCNO"), count=_number(environment, "_CONDOR_NPROCS")
        )
    if not environment.get("_CONDOR_JOB_AD"):
        return None
    try:
        with Path(environment["_CONDOR_JOB_AD"]).open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_AD)
    except OSError:
        return None
    ad = dict(re.findall(r"^(ProcId|TotalSubmitProcs) *= *(\d{1,9})$", text, re.MULTILINE))
    if "ProcId" not in ad:
        return None
    return ArrayTask("HTCondor", int(ad["ProcId"]), count=int(ad["TotalSubmitProcs"]) if len(ad) == 2 else None)


_SCHEDULERS: tuple[Callable[[Mapping[str, str]], ArrayTask | None], ...] = (
    _slurm,
    _kubernetes,
    _lsf,
    _pbs,
    _grid_engine,
    _condor,
)
"""The first that has started the process counts."""


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name, "")
    if re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    if default is None:
        raise InvalidArgumentError(
            f"the environment's {name} is not a number: {value[:60]!r}", hint="Give the number: --shard i/N."
        )
    return default
