"""What runs on a worker: lay files out, write them with one thread, return their receipts."""

import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from ckpt.pipeline.checks import listed_seals
from ckpt.pipeline.resources import Resources
from ckpt.pipeline.shared_plan import SharedPlan
from ckpt.pipeline.target import SharedTarget, run_has_ended
from ckpt.pipeline.write_files import write_files
from ckpt_formats.core.errors import OutputError
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.identity import Identities, Identity, is_same
from ckpt_formats.core.seal_checks import ListedSeals
from ckpt_formats.core.version import VERSION

TaskFiles = tuple[tuple[int, ...], ...]
"""The numbers of a task's files in the plan: groups of files that are written in step, one group after the other."""


@dataclass(frozen=True)
class WorkerJob:
    """All that the tasks of a job share. It is sent to each worker process once."""

    shared: SharedPlan
    identities: Identities
    memory: int
    """Bytes of tensor data that one task holds in memory."""
    target: SharedTarget
    version: str = VERSION

    @cached_property
    def listed(self) -> ListedSeals:
        """The checksums that all processes know."""
        return listed_seals(self.shared.source, self.shared.format)

    @cached_property
    def local_identities(self) -> Identities:
        """The identities of the source's files, as this machine sees them."""
        return _LocalIdentities(self.identities)


@dataclass(frozen=True)
class Failure:
    """An error of a task."""

    error: Exception
    traceback: str


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    receipts: tuple[Receipt, ...]
    """Of the files that are complete."""
    seconds: float
    where: str
    failure: Failure | None = None


def write_task(job: WorkerJob, files: TaskFiles) -> Outcome:
    """Write some files of the plan. Errors are part of the outcome, so that they travel whole."""
    started, receipts, failure = time.monotonic(), list[Receipt](), None
    try:
        check_version(job.version)
        _check_source(job.identities)
        with job.target.attempt() as sink:
            groups, format = [job.shared.files(numbers) for numbers in files], job.shared.format
            resources, watch = Resources(1, job.memory), _Watch(job.target)
            written = write_files(
                sink, format, groups, resources, job.local_identities, job.listed, threading.Event(), watch
            )
            receipts.extend(written)
    except Exception as error:
        failure = Failure(error, traceback.format_exc())
    return Outcome(tuple(receipts), time.monotonic() - started, place(), failure)


def place() -> str:
    """Where this process runs."""
    return f"{socket.gethostname()} (process {os.getpid()})"


def version_here() -> str:
    """The version of ckpt on a worker."""
    return VERSION


def check_version(version: str) -> None:
    """Raise `OutputError` unless ckpt has this version here. What is written so far stays."""
    if version != VERSION:
        raise OutputError(
            f"this machine has ckpt {VERSION}, but the job is of ckpt {version}",
            where=place(),
            hint="Install the same version on all machines.",
        )


def _check_source(identities: Identities) -> None:
    """Raise `OutputError` if the source cannot be seen from here."""
    for path in islice(identities, 1):
        if not path.exists():
            raise OutputError(
                f"the worker on {socket.gethostname()} does not see the source",
                where=path,
                hint="All workers must see source and target under the same paths: on a shared file system, "
                "or in an object store.",
            )


class _Watch:
    """Called with numbers of bytes while files are written. Raises `OutputError` when the run has ended."""

    def __init__(self, target: SharedTarget) -> None:
        self._target, self._next = target, time.monotonic() + target.check_every

    def __call__(self, nbytes: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._target.check_every
        if not self._target.is_open():
            raise run_has_ended()


class _LocalIdentities(Mapping[Path, Identity]):
    """Identities of files of another machine, with the numbers of device and inode that they have on this one.

    A network file system may number devices, and some also inodes, as each machine likes. So at first sight of a file,
    its size and time are compared; from then on, everything.
    """

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._local: dict[Path, Identity] = {}

    def __getitem__(self, path: Path) -> Identity:
        if path not in self._local:
            there = self._identities[path]
            here = Identity.of(path.stat())
            alike = replace(there, device=here.device, inode=here.inode)
            self._local[path] = here if is_same(path, alike, here) else there
        return self._local[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._identities)

    def __len__(self) -> int:
        return len(self._identities)
