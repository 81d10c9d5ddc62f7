"""What a cluster does, whichever it is, and the errors that Dask and Ray share."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from ckpt_formats.core.errors import OutputError, UnsupportedError
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
