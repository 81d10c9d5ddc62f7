"""Ranks of one run as forked processes, and what one of them spends. The parent has imported what they need."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
_TIMEOUT = timedelta(seconds=240)


class Failed(Exception):
    """A rank ended badly; the message has its last lines."""


def on_ranks(world: int, work: Callable[..., Any], *arguments: object) -> list[Any]:
    """What `work(*arguments)` returns on each rank of a gloo group, as JSON. Raises `Failed`."""
    with tempfile.TemporaryDirectory(prefix="ckpt-ranks-") as temporary:
        folder, port = Path(temporary), _free_port()
        children = [_fork(rank, world, port, folder, work, arguments) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            first = next(rank for rank, code in enumerate(codes) if code)
            lines = (folder / f"{first}.log").read_text(errors="replace")[-2000:]
            raise Failed(f"exit codes {codes}\n{lines}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _fork(
    rank: int, world: int, port: int, folder: Path, work: Callable[..., Any], arguments: tuple[object, ...]
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=_TIMEOUT
        )
        (folder / f"{rank}.json").write_text(json.dumps(work(*arguments)))
        distributed.barrier()
        distributed.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass(frozen=True)
class Cost:
    """What this process spent."""

    cpu: float
    """User and system seconds of all its threads."""
    wall: float
    added: int
    """The most memory that it had at once, in bytes, less what it had before. Pages of mapped files count."""
    read: int
    """Bytes that it got from `read` and its like."""


class Meter:
    """Measures this process from its construction to `cost`."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident set begins again
        self._resident, self._read = _status("VmRSS"), _rchar()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def cost(self) -> Cost:
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        return Cost(cpu, wall, _status("VmHWM") - self._resident, _rchar() - self._read)

    def row(self) -> dict[str, float]:
        return asdict(self.cost())


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _rchar() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
