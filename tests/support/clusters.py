"""Real clusters on this machine: a scheduler of Dask and its workers, each a process that a test may kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 300
_PATHS = os.pathsep.join(str(ROOT / name) for name in (".", "formats", "codecs", "tests/support"))


def environment(**more: str) -> dict[str, str]:
    """As of a machine on which ckpt is installed."""
    quiet = {"OPENBLAS_NUM_THREADS": "1", "DASK_DISTRIBUTED__ADMIN__LOW_LEVEL_LOG_LENGTH": "100"}
    return {**os.environ, **quiet, **more, "PYTHONPATH": os.pathsep.join([*more.get("FIRST", "").split(), _PATHS])}


class DaskProcesses:
    """A scheduler and workers with one thread each."""

    def __init__(self, workers: int, folder: Path) -> None:
        self.folder = folder
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show")
        self.address = self._address()
        self.url = self.address.replace("tcp://", "dask://")
        self.workers = [self.start_worker() for _ in range(workers)]
        self.wait_for(workers)

    def start_worker(self, **more: str) -> subprocess.Popen[bytes]:
        # No nanny: a worker that is killed stays dead.
        options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0"]
        return self._start("worker", self.address, *options, "--local-directory", str(self.folder), **more)

    def restore(self, count: int) -> None:
        """Start workers for those that were killed."""
        for worker in self.workers:
            worker.send_signal(signal.SIGCONT)
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        self.workers += [self.start_worker() for _ in range(count - len(self.workers))]
        self.wait_for(count)

    def wait_for(self, count: int) -> None:
        from distributed import Client

        with Client(self.address, set_as_default=False) as client:
            client.wait_for_workers(count, timeout=SECONDS)
            until = time.monotonic() + SECONDS
            while len(client.nthreads()) != count and time.monotonic() < until:
                time.sleep(0.05)

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def _start(self, role: str, *options: str, **more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{role}", *options]
        with (self.folder / f"{role}.log").open("ab") as log:
            return subprocess.Popen(command, env=environment(**more), stdout=log, stderr=log, cwd=self.folder)

    def _address(self) -> str:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            match = re.search(r"(tcp://127\.0\.0\.1:\d+)", (self.folder / "scheduler.log").read_text())
            if match:
                return match[1]
            time.sleep(0.05)
        raise AssertionError((self.folder / "scheduler.log").read_text())


@contextmanager
def dask_processes(workers: int, folder: Path) -> Iterator[DaskProcesses]:
    cluster = DaskProcesses(workers, folder)
    try:
        yield cluster
    finally:
        cluster.close()


class At:
    """A callback for progress that does something once, when a share of the bytes is written."""

    def __init__(self, share: float, act: Callable[[], object]) -> None:
        self._share, self._act = share, act
        self._lock = threading.Lock()
        self.happened = False

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            if not self.happened and done >= self._share * total:
                self.happened = True
                self._act()


def files(path: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in there."""
    return {one.relative_to(path).as_posix(): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}
