"""Processes of a training run, forked from one that has imported the engine already.

Importing torch and DeepSpeed takes seconds and is paid once; after a fork each run has the globals of a fresh process
to itself, so any number of runs, of any size, can follow each other. Safe only while the parent has started no thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path


class RunFailed(Exception):
    """A rank ended badly; the message holds the end of what it printed."""


def run(world: int, work: Callable[[], None], log: Path, timeout: float = 120) -> None:
    """Call `work` in `world` processes joined in one process group; what rank r prints goes to `log`/rank{r}.log."""
    log.mkdir(parents=True, exist_ok=True)
    meeting = tempfile.mkdtemp(prefix="ranks-")
    children: dict[int, int] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be(rank, world, work, log, meeting)
        children[pid] = rank
    try:
        _wait(dict(children), log, timeout)
    finally:
        for pid in children:
            _end(pid)
        shutil.rmtree(meeting, ignore_errors=True)


def _be(rank: int, world: int, work: Callable[[], None], log: Path, meeting: str) -> None:
    """The life of a child; never returns."""
    code = 1
    try:
        out = os.open(log / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        # DeepSpeed wants the address of a meeting place to be set even where the ranks meet in a file.
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        import deepspeed
        import deepspeed.ops
        from torch import distributed

        # DeepSpeed's shared-memory collectives are optional, take minutes to compile and spin on every core.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(
            "gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
        work()
        distributed.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing that the parent registered to happen at exit may happen here as well.
        os._exit(code)


def _wait(running: dict[int, int], log: Path, timeout: float) -> None:
    limit = time.monotonic() + timeout
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            if status:
                raise RunFailed(f"rank {rank} ended with status {status}:\n{tail(log / f'rank{rank}.log')}")
        elif time.monotonic() > limit:
            rank = min(running.values())
            raise RunFailed(f"rank {rank} still runs after {timeout:.0f} s:\n{tail(log / f'rank{rank}.log')}")
        else:
            time.sleep(0.005)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"
