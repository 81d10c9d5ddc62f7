"""The coordinator of a job on a cluster: which task runs when, what is started once more, and how far all is."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import count
from statistics import median

from ckpt.pipeline.cluster.cluster import Cluster, Start
from ckpt.pipeline.cluster.worker import Outcome, TaskFiles, WorkerJob
from ckpt.pipeline.groups import Group, in_step, nbytes
from ckpt.pipeline.interrupts import raise_if_interrupted
from ckpt_formats.core.arguments import Checked, Count
from ckpt_formats.core.format import FilePlan, Receipt

_WAIT = 0.5
"""Seconds between two looks at what runs, and whether Ctrl-C was pressed."""
_STATUS_EVERY = 30.0
"""Seconds between two lines about what runs."""
_AHEAD = 2
"""Tasks that are submitted for each one that can run, so that no worker waits for its next one."""
_MIN_AHEAD = 16
"""At least so many are submitted: a cluster that starts workers on demand has none before."""
_GROUPS = 4
"""Groups of files for each worker. Files are written in step only where as many groups are left."""
_BATCH_NBYTES = 64 << 20
"""Small groups are joined to tasks of about so many bytes: the files of a task are flushed to the disk together."""
_BATCH_FILES = 64
"""Files of a task at the most: their numbers take less than 1 kB."""
_SLOW = 3.0
"""A task is started once more if it takes so many times longer than the median, in relation to its bytes."""
_MIN_SLOW = 5.0
"""Seconds that a task may always take."""


@dataclass(frozen=True)
class ClusterStatus(Checked):
    """How far a job on a cluster is."""

    files: Count
    files_done: Count
    workers: Count
    running: Count
    """Tasks that run."""
    slowest: str = ""
    """The first file of the task that has run for the longest time."""
    where: str = ""
    """Where it runs: host and process."""
    seconds: float = 0.0
    """For how long it has run."""

    def __str__(self) -> str:
        text = f"{self.files_done} of {self.files} files written, {self.running} tasks run on {self.workers} workers"
        return (
            f"{text}; the slowest, {self.slowest}, for {self.seconds:.0f} s on {self.where}" if self.slowest else text
        )


@dataclass(eq=False)
class _Task:
    """One run of a batch of files. There are two if the first is slow."""

    batch: int
    future: "Future[Outcome]"


def groups_for(files: Sequence[FilePlan], slots: int, max_size: int) -> list[Group]:
    """The files in groups that are written in step, where there are enough of them for all workers."""
    return in_step(files, max(1, min(max_size, len(files) // (_GROUPS * max(slots, 1)))))


def batches(groups: Sequence[Group], slots: int) -> list[tuple[Group, ...]]:
    """The groups in their order, small ones joined, as long as there are some tasks for each worker."""
    most = min(_BATCH_NBYTES, sum(map(nbytes, groups)) // (_GROUPS * max(slots, 1)))
    joined, batch, files, total = list[tuple[Group, ...]](), list[Group](), 0, 0
    for group in groups:
        if batch and (total + nbytes(group) > most or files + len(group) > _BATCH_FILES):
            joined.append(tuple(batch))
            batch, files, total = [], 0, 0
        batch.append(group)
        files, total = files + len(group), total + nbytes(group)
    return [*joined, tuple(batch)] if batch else joined


def write_on_cluster(
    cluster: Cluster,
    job: WorkerJob,
    groups: Sequence[Group],
    stop: threading.Event,
    show_status: Callable[[ClusterStatus], None] = lambda status: None,
) -> Iterator[Receipt]:
    """Write the files on the workers. The first receipt of a file counts; of two runs of a task, the first to end.

    After the first error no task is started any more, and those that run get a request to stop. Then it is raised.
    """
    cluster.share(job)
    run = _Coordination(cluster, job, groups, show_status)
    try:
        while not run.is_done:
            run.submit()
            done = wait([task.future for task in run.running.values()], _WAIT, FIRST_COMPLETED).done
            raise_if_interrupted(stop)
            for number in [number for number, task in run.running.items() if task.future in done]:
                yield from run.finish(number)
            run.start_slow_tasks_again()
            run.show_status_sometimes()
    finally:
        cluster.cancel({number: task.future for number, task in run.running.items()})


class _Coordination:
    def __init__(
        self, cluster: Cluster, job: WorkerJob, groups: Sequence[Group], show_status: Callable[[ClusterStatus], None]
    ) -> None:
        self._cluster, self._batches, self._show_status = cluster, batches(groups, cluster.slots()), show_status
        position = {file.file: number for number, file in enumerate(job.shared.planned)}
        self._files: list[TaskFiles] = [
            tuple(tuple(position[file.file] for file in group) for group in batch) for batch in self._batches
        ]
        self._nbytes = [max(1, sum(map(nbytes, batch))) for batch in self._batches]
        self._counts = [sum(map(len, batch)) for batch in self._batches]
        self._waiting = deque(range(len(self._batches)))
        self._numbers = count()
        self._left = set(range(len(self._batches)))
        """Batches whose files are not written yet."""
        self._again: set[int] = set()
        """Batches that were started once more."""
        self._paces: list[float] = []
        """Seconds for each byte, of the tasks that have ended."""
        self._shown = self._last_end = time.monotonic()
        self.running: dict[int, _Task] = {}

    @property
    def is_done(self) -> bool:
        return not self._left

    def submit(self) -> None:
        """Submit tasks, as many as the cluster can soon run."""
        capacity = max(_AHEAD * self._cluster.slots(), _MIN_AHEAD) if self._waiting else 0
        while self._waiting and len(self.running) < capacity:
            self._start(self._waiting.popleft())

    def _start(self, batch: int) -> None:
        number = next(self._numbers)
        future = self._cluster.submit(number, self._files[batch])
        self.running[number] = _Task(batch, future)

    def finish(self, number: int) -> list[Receipt]:
        """The receipts of a task that has ended. Raises its error, unless another run of it goes on or succeeded."""
        task = self.running.pop(number)
        if task.batch not in self._left:
            return []
        has_twin = any(other.batch == task.batch for other in self.running.values())
        error = task.future.exception()
        if error is not None:
            if has_twin:
                return []
            raise error
        outcome = task.future.result()
        if outcome.failure is not None:
            if has_twin:
                return []
            raise outcome.failure.error from _OnWorker(f"\n\non {outcome.where}:\n{outcome.failure.traceback}")
        self._left.discard(task.batch)
        self._last_end = time.monotonic()
        self._paces.append(outcome.seconds / self._nbytes[task.batch])
        return list(outcome.receipts)

    def start_slow_tasks_again(self) -> None:
        """With nothing left to start, start those once more that take much longer than the others."""
        if self._waiting or not self._paces or not self._left:
            return
        pace, now, started = median(self._paces), time.monotonic(), self._cluster.started()
        for number, task in list(self.running.items()):
            if task.batch in self._again or task.batch not in self._left:
                continue
            # A task that has not started waits for others, unless none has ended for long: then its worker hangs.
            start = started[number].at if number in started else self._last_end
            if now - start > max(_MIN_SLOW, _SLOW * pace * self._nbytes[task.batch]):
                self._again.add(task.batch)
                self._start(task.batch)

    def show_status_sometimes(self) -> None:
        if time.monotonic() - self._shown >= _STATUS_EVERY:
            self._shown = self._last_end = time.monotonic()
            self._show_status(self._status())

    def _status(self) -> ClusterStatus:
        started, now = self._cluster.started(), time.monotonic()
        running: list[tuple[Start, _Task]] = [(started[n], task) for n, task in self.running.items() if n in started]
        files = sum(self._counts)
        done = files - sum(self._counts[batch] for batch in self._left)
        if not running:
            return ClusterStatus(files, done, self._cluster.workers(), 0)
        start, task = min(running, key=lambda one: one[0].at)
        name = self._batches[task.batch][0][0].file
        return ClusterStatus(files, done, self._cluster.workers(), len(running), name, start.where, now - start.at)


class _OnWorker(Exception):
    """The traceback of an error on a worker: its cause, for `-v`."""
