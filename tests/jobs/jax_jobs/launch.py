"""Start JAX from a test, in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_TIMEOUT = 300


class JaxError(Exception):
    """The process failed: what it said last."""


def run(script: str, *arguments: object) -> None:
    """Run a script of this folder. Raises `JaxError` if it fails."""
    _wait(_start(script, *arguments))


def _start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", str(HERE / script), *map(str, arguments)]
    # Programs run a few steps: most of their time is that of the compiler.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=_TIMEOUT)
    finally:
        process.kill()
    if process.returncode:
        raise JaxError(errors[-4000:])


def save_all(out: Path) -> None:
    """Save a checkpoint in every way (see `save.py`)."""
    run("save.py", out)


def save_by_processes(out: Path) -> None:
    """Save checkpoints by two processes (see `processes.py`)."""
    out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for process in [_start("processes.py", out, port, rank) for rank in (0, 1)]:
        _wait(process)


def load_all(jobs: Sequence[dict[str, Any]], folder: Path) -> None:
    """Load checkpoints with Orbax, each of which leaves what its memory has (see `load.py`)."""
    _run_all("load.py", jobs, folder)


def train_all(jobs: Sequence[dict[str, Any]], folder: Path) -> None:
    """Train with JAX, each from a checkpoint or from the start (see `train.py`)."""
    _run_all("train.py", jobs, folder)


def _run_all(script: str, jobs: Sequence[dict[str, Any]], folder: Path) -> None:
    listed = folder / f"{script}.jobs"
    listed.write_text(json.dumps(jobs, default=str))
    run(script, listed)
