"""Clusters whose workers write the files of a job: Dask and Ray, behind one small interface.

    distribute     the coordinator: which task runs when, what is started once more, the progress
    worker         what runs on a worker: lay files out, write them, return their receipts
    dask_cluster   Dask
    ray_cluster    Ray

A cluster only has to run a function of plain data somewhere, perhaps several times. It needs no file of its own, and
neither knows what a checkpoint is.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from ckpt_formats.core.errors import InvalidArgumentError, OutputError, UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.core.version import VERSION

if TYPE_CHECKING:
    from ckpt.pipeline.cluster.worker import Outcome, TaskFiles, WorkerJob

RETRIES = 3
"""How often a task is started again whose worker has died."""

_RESUME = "Run the same command again to go on, with a cluster or without."


@dataclass(frozen=True)
class Start:
    """Where and when a task began to run."""

    where: str
    at: float
    """Seconds, by the coordinator's `time.monotonic`."""


class Cluster(Protocol):
    """Runs tasks of one job on workers. A task is a few numbers of files in the plan."""

    @property
    def url(self) -> str:
        """The URL that the user gave."""

    def share(self, job: "WorkerJob") -> None:
        """Send the job to the workers: to each process once, also to those that come later."""

    def submit(self, task: int, files: "TaskFiles") -> "Future[Outcome]":
        """Run task number `task`, which writes these files of the plan. Its errors are those of the cluster.

        If the worker dies, the cluster begins the task again, `RETRIES` times.
        """

    def cancel(self, tasks: "Mapping[int, Future[Outcome]]") -> None:
        """Do not start these tasks, if they have not started."""

    def started(self) -> Mapping[int, Start]:
        """Where the tasks that have started run, or ran."""

    def workers(self) -> int:
        """How many workers there are."""

    def slots(self) -> int:
        """How many tasks can run at once."""

    def close(self) -> None:
        """Forget the job, and leave the cluster."""


def connect(url: str) -> Cluster:
    """The cluster at a URL: `dask://HOST:PORT`, `ray://HOST:PORT`, `ray://auto` or `ray://`.

    Raises `InvalidArgumentError` if it is none, `UnsupportedError` if the package is not installed, or if the workers
    have another version of ckpt or none; `OutputError` if nobody answers.
    """
    kind, separator, _ = url.partition("://")
    try:
        if separator and kind in ("dask", "dask+tls"):
            from ckpt.pipeline.cluster.dask_cluster import DaskCluster

            return DaskCluster(url)
        if separator and kind == "ray":
            from ckpt.pipeline.cluster.ray_cluster import RayCluster

            return RayCluster(url)
    except ModuleNotFoundError as error:
        extra = kind.partition("+")[0]
        raise UnsupportedError(
            f"this executor needs the package {error.name}",
            where=printable(url),
            hint=f"Install it, here and on all workers: pip install 'ckpt-suite[{extra}]'.",
        ) from None
    raise InvalidArgumentError(
        "is no executor that ckpt knows",
        where=printable(url),
        hint="It is dask://HOST:PORT, ray://HOST:PORT, or ray:// for a cluster that runs here.",
    )


def check_workers(url: str, versions: Iterable[str]) -> None:
    """Raise `UnsupportedError` unless the workers have this version of ckpt."""
    for version in versions:
        if version != VERSION:
            raise UnsupportedError(
                f"a worker has ckpt {version}, and this machine ckpt {VERSION}",
                where=printable(url),
                hint="Install the same version on all machines.",
            )


def no_ckpt(url: str, reason: object) -> UnsupportedError:
    """The error for workers that cannot import ckpt."""
    return UnsupportedError(
        f"a worker cannot import ckpt: {reason}", where=printable(url), hint=f"Install ckpt {VERSION} on all workers."
    )


def unreachable(url: str, reason: object) -> NoReturn:
    """Raise the error for a cluster that does not answer."""
    raise OutputError(
        f"the cluster does not answer: {reason}", where=printable(url), hint="Is its scheduler running there?"
    )


def lost_cluster(url: str, reason: object) -> OutputError:
    """The error for a scheduler that is lost while tasks run."""
    return OutputError(f"the cluster was lost: {reason}", where=printable(url), hint=_RESUME)


def lost_worker(url: str, reason: object) -> OutputError:
    """The error for a task whose workers have died, one after the other."""
    return OutputError(
        f"workers died while they wrote the same file, the last of {RETRIES + 1} times: {reason}",
        where=printable(url),
        hint=f"Do they have too little memory? A worker needs --memory and about 0.5 GB. {_RESUME}",
    )
