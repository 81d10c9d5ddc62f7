"""Ray: a cluster that runs already, or one that is started here. The job is an object that each worker gets once."""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

import ray
from ray import exceptions

from ckpt.pipeline.cluster.cluster import RETRIES, Start, check_workers, lost_cluster, lost_worker, no_ckpt, unreachable
from ckpt.pipeline.cluster.worker import Outcome, TaskFiles, WorkerJob, place, version_here, write_task
from ckpt_formats.core.errors import UnsupportedError

_ASK_EVERY = 1.0
"""Seconds between two questions to the cluster: who is there, and what has started."""
_ANSWER = 10.0
"""Seconds until it must answer."""
_START = 120.0
"""Seconds until a first worker must have started."""
_JOBS: dict[str, WorkerJob] = {}
"""The job of this worker process, by its token: a process is used again by other tasks."""


class RayCluster:
    """`ray://HOST:PORT`, `ray://auto` or `ray://`.

    The port is that of Ray's client (10001); `auto` is the cluster to which this machine belongs; without a place, the
    same, or a new cluster of this machine's cores if there is none.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._token = uuid4().hex
        self._started: dict[int, Start] = {}
        self._references: dict[int, Any] = {}
        self._last_question = self._last_count = 0.0
        self._slots = self._workers = 0
        self._has_started = not ray.is_initialized()
        if self._has_started:
            self._connect(url)
        try:
            self._check_versions()
        except BaseException:
            self.close()
            raise
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
        self._task = ray.remote(_run).options(num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD")

    def _connect(self, url: str) -> None:
        place = url.partition("://")[2]
        address = {"": None, "auto": "auto"}.get(place, url)
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            unreachable(url, error)
        except ImportError as error:  # Ray's client is an extra of Ray
            raise UnsupportedError(
                f"Ray's client is not installed here: {error}",
                where=url,
                hint="pip install 'ray[client]', or run the command on a machine of the cluster, with ray://auto.",
            ) from None

    def _check_versions(self) -> None:
        try:
            version = ray.get(ray.remote(num_cpus=0)(version_here).remote(), timeout=_START)
        except exceptions.RayTaskError as error:
            raise no_ckpt(self.url, error.cause) from None
        except exceptions.RayError as error:
            unreachable(self.url, _first_line(error))
        check_workers(self.url, [version])

    def share(self, job: WorkerJob) -> None:
        self._job = ray.put(job)

    def submit(self, task: int, files: TaskFiles) -> "Future[Outcome]":
        # A reference within a list is not resolved for each task: `_run` does so once for each process.
        reference = self._task.remote(self._token, [self._job], self._board, task, files)
        self._references[task] = reference
        result: Future[Outcome] = Future()

        def copy(done: "Future[Outcome]") -> None:
            self._references.pop(task, None)
            try:
                result.set_result(done.result())
            except (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError) as error:
                result.set_exception(lost_worker(self.url, _first_line(error)))
            except exceptions.RayTaskError as error:
                result.set_exception(error.cause)
            except exceptions.RayError as error:
                result.set_exception(lost_cluster(self.url, _first_line(error)))
            except BaseException as error:
                result.set_exception(lost_cluster(self.url, error))

        reference.future().add_done_callback(copy)
        return result

    def cancel(self, tasks: "Mapping[int, Future[Outcome]]") -> None:
        for task in tasks:
            reference = self._references.get(task)
            if reference is not None and ray.is_initialized():
                ray.cancel(reference)

    def started(self) -> Mapping[int, Start]:
        now = time.monotonic()
        if now - self._last_question >= _ASK_EVERY:
            self._last_question = now
            try:
                starts = ray.get(self._board.read.remote(len(self._started)), timeout=_ANSWER)
            except exceptions.RayError:  # the actor is being started elsewhere
                starts = []
            for task, where, ago in starts:
                self._started[task] = Start(where, now - ago)
        return dict(self._started)

    def workers(self) -> int:
        self._look()
        return self._workers

    def slots(self) -> int:
        self._look()
        return self._slots

    def _look(self) -> None:
        if time.monotonic() - self._last_count >= _ASK_EVERY:
            self._last_count = time.monotonic()
            self._slots = self._workers = int(ray.cluster_resources().get("CPU", 0))

    def close(self) -> None:
        if self._has_started:
            ray.shutdown()
        elif hasattr(self, "_board"):
            ray.kill(self._board)


class _Board:
    """An actor on which tasks note that they have started."""

    def __init__(self) -> None:
        self._starts: list[tuple[int, str, float]] = []

    def note(self, task: int, where: str) -> None:
        self._starts.append((task, where, time.monotonic()))

    def read(self, first: int) -> list[tuple[int, str, float]]:
        """All starts from number `first` on: task, place, and how many seconds ago."""
        now = time.monotonic()
        return [(task, where, now - at) for task, where, at in self._starts[first:]]


def _run(token: str, job: list[Any], board: Any, task: int, files: TaskFiles) -> Outcome:
    """On a worker: say that the task begins, and do it."""
    board.note.remote(task, place())
    if token not in _JOBS:
        _JOBS.clear()
        _JOBS[token] = ray.get(job[0])
    return write_task(_JOBS[token], files)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
