"""Dask: the workers of a scheduler that runs already. The job goes to each worker once, as a plugin."""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import dask
from distributed import Client, KilledWorker, WorkerPlugin, get_worker

from ckpt.pipeline.cluster.cluster import Start, check_workers, lost_cluster, lost_worker, no_ckpt, unreachable
from ckpt.pipeline.cluster.worker import Outcome, TaskFiles, WorkerJob, place, version_here, write_task
from ckpt_formats.core.errors import InvalidArgumentError

_CONNECT = 20
"""Seconds until a scheduler must answer."""
_ANSWER = 60
"""Seconds until all workers must have stated which version of ckpt they have."""
_IMPORT = f"import {version_here.__module__}"
_GOODBYE = 3
"""Seconds for farewells."""
_FETCHERS = 16
"""Threads that fetch receipts from workers."""
_JOBS: dict[str, WorkerJob] = {}
"""The jobs of this worker process, by their tokens."""


class DaskCluster:
    """`dask://HOST:PORT`, `dask+tls://HOST:PORT`, or `dask:///path/of/scheduler.json`.

    Without an address, that of Dask's configuration (`DASK_SCHEDULER_ADDRESS`).
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._token = uuid4().hex
        self._started: dict[int, Start] = {}
        self._tasks: dict[int, Any] = {}
        self._fetchers = ThreadPoolExecutor(_FETCHERS, "ckpt-results")
        self._slots, self._workers, self._last_count = 0, 0, 0.0
        self._client = self._connected(url)
        try:
            self._check_versions()
        except BaseException:
            self._client.close(timeout=_GOODBYE)
            raise
        self._client.subscribe_topic(self._token, self._note_start)

    def _connected(self, url: str) -> Client:
        kind, _, place = url.partition("://")
        known = dask.config.get("scheduler-address", None) or dask.config.get("scheduler_address", None)
        if not place and not known:
            raise InvalidArgumentError("names no scheduler", where=url, hint="It is dask://HOST:PORT.")
        address = {"scheduler_file": place} if place.startswith("/") else {}
        if not address:
            protocol = "tls" if kind.endswith("tls") else "tcp"
            address = {"address": f"{protocol}://{place}" if place else known}
        try:
            return Client(**address, timeout=_CONNECT, set_as_default=False, name="ckpt")
        except (OSError, ValueError) as error:  # a timeout is an OSError
            unreachable(url, error)

    def _check_versions(self) -> None:
        try:
            # A function of ckpt would fail where Dask unpacks it, with an error that does not say why.
            self._client.sync(self._client._run, exec, _IMPORT, callback_timeout=_ANSWER)
            versions = self._client.sync(self._client._run, version_here, callback_timeout=_ANSWER)
            check_workers(self.url, versions.values())
        except TimeoutError:
            unreachable(self.url, f"a worker says nothing for {_ANSWER} s")
        except ImportError as error:
            raise no_ckpt(self.url, error) from None

    def share(self, job: WorkerJob) -> None:
        # The plugin also goes to workers that are started later. They check the version with each task.
        self._client.register_plugin(_JobPlugin(self._token, job), name=self._token)

    def submit(self, task: int, files: TaskFiles) -> "Future[Outcome]":
        result: Future[Outcome] = Future()
        # The key has no relation to the arguments: a task that is started once more is another one.
        key = f"ckpt-{self._token}-{task}"
        submitted = self._client.submit(_run, self._token, task, files, key=key, pure=False)
        self._tasks[task] = submitted

        def copy(done: Any) -> None:
            self._tasks.pop(task, None)
            try:
                result.set_result(done.result())
            except KilledWorker as error:
                result.set_exception(lost_worker(self.url, f"the last was {error.last_worker.address}"))
            except (CancelledError, asyncio.CancelledError, OSError) as error:
                result.set_exception(lost_cluster(self.url, str(error) or type(error).__name__))
            except Exception as error:
                result.set_exception(error)

        # Dask has one thread for all callbacks, and a result on a worker that hangs would block it.
        submitted.add_done_callback(lambda done: self._fetchers.submit(copy, done))
        return result

    def cancel(self, tasks: "Mapping[int, Future[Outcome]]") -> None:
        running = [submitted for task in tasks if (submitted := self._tasks.get(task)) is not None]
        if running and self._client.status == "running":
            self._client.cancel(running)

    def started(self) -> Mapping[int, Start]:
        return dict(self._started)

    def _note_start(self, event: tuple[float, Any]) -> None:
        task, where = event[1]
        self._started[task] = Start(where, time.monotonic())

    def workers(self) -> int:
        self._look()
        return self._workers

    def slots(self) -> int:
        self._look()
        return self._slots

    def _look(self) -> None:
        """Ask, at most once a second, how many workers and threads there are."""
        if time.monotonic() - self._last_count < 1 or self._client.status != "running":
            return
        threads = self._client.nthreads()
        self._last_count, self._workers, self._slots = time.monotonic(), len(threads), sum(threads.values())

    def close(self) -> None:
        try:
            if self._client.status == "running":
                unregister = self._client._unregister_worker_plugin
                self._client.sync(unregister, self._token, callback_timeout=_GOODBYE)
        except Exception:
            pass  # the scheduler is lost, and its plugins with it; or a worker hangs
        finally:
            self._client.close(timeout=_GOODBYE)
            self._fetchers.shutdown(wait=False, cancel_futures=True)


class _JobPlugin(WorkerPlugin):  # type: ignore[misc]  # its types are not read
    """Brings the job into a worker process, and removes it at the end."""

    def __init__(self, token: str, job: WorkerJob) -> None:
        self.name = token
        self._job = job

    def setup(self, worker: Any) -> None:
        _JOBS[self.name] = self._job

    def teardown(self, worker: Any) -> None:
        _JOBS.pop(self.name, None)


def _run(token: str, task: int, files: TaskFiles) -> Outcome:
    """On a worker: say that the task begins, and do it."""
    get_worker().log_event(token, (task, place()))
    return write_task(_JOBS[token], files)
