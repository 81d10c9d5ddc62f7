"""Processes of a training run, forked from one that has imported the engine already.

Importing torch and DeepSpeed takes seconds and is paid once; after a fork each run has the globals of a fresh process
to itself, so any number of runs, of any size, can follow each other. Safe only while the parent has started no thread.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path


class RunFailed(Exception):
    """A rank ended badly; the message holds the end of what it printed."""


def join_torch(rank: int, world: int, meeting: str) -> None:
    """Join the process group in the way of PyTorch alone."""
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )


def join_deepspeed(rank: int, world: int, meeting: str) -> None:
    """Join the process group in DeepSpeed's way."""
    import deepspeed
    import deepspeed.ops

    # DeepSpeed's shared-memory collectives are optional, take minutes to compile and spin on every core.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=120))


def run(
    world: int,
    work: Callable[[], None],
    log: Path,
    timeout: float = 120,
    join: Callable[[int, int, str], None] = join_deepspeed,
) -> None:
    """Call `work` in `world` processes joined in one process group; what rank r prints goes to `log`/rank{r}.log."""
    import torch._dynamo  # noqa: F401 -- or each rank's first optimizer would, for seconds

    gc.freeze()  # engines collect garbage often; none of it is among what was imported
    log.mkdir(parents=True, exist_ok=True)
    meeting = Path(tempfile.mkdtemp(prefix="ranks-"))
    children: dict[int, int] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be(rank, world, work, log, meeting, join)
        children[pid] = rank
    try:
        _wait(dict(children), log, timeout)
        _import_for_later_runs((meeting / _IMPORTED).read_text().split())
    finally:
        for pid in children:
            _end(pid)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(meeting, ignore_errors=True)


def _be(
    rank: int,
    world: int,
    work: Callable[[], None],
    log: Path,
    meeting: Path,
    join: Callable[[int, int, str], None],
) -> None:
    """The life of a child; never returns."""
    code, before = 1, set(sys.modules)
    os.setsid()  # what this rank starts, such as Megatron's writers, is ended with it
    try:
        out = os.open(log / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        # DeepSpeed wants the address of a meeting place to be set even where the ranks meet in a file.
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        from torch import distributed

        join(rank, world, f"file://{meeting}/store")
        work()
        distributed.barrier()
        if rank == 0:
            (meeting / _IMPORTED).write_text("\n".join(name for name in sys.modules if name not in before))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing that the parent registered to happen at exit may happen here as well.
        os._exit(code)


def _import_for_later_runs(modules: list[str]) -> None:
    """Import what a run needed, of some packages that are imported already, so that ranks of later runs need not."""
    packages = _LATE & sys.modules.keys()
    for name in modules:
        if name.partition(".")[0] in packages:
            with suppress(ImportError):  # torch has modules that no file holds
                importlib.import_module(name)


_IMPORTED = "imported"
"""The file in which rank 0 lists the modules that it imported itself."""
_LATE = {"ckpt", "ckpt_cli", "ckpt_codecs", "ckpt_formats", "ckpt_recorder", "ckpt_training", "deepspeed", "torch"}
"""Packages whose modules change nothing but themselves when they are imported."""


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
