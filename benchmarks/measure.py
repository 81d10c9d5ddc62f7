"""Run a command and measure its whole process tree: wall, CPU, memory, bytes written.

Imports little: a child's peak as the kernel counts it is at least the size of the process that started it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil

_EVERY = 0.02


@dataclass(frozen=True)
class Run:
    """What one run cost."""

    wall: float
    cpu: float
    """User and system seconds of all processes."""
    tree: int
    """Peak of the sum of the resident sets, in bytes, as sampled; pages that processes share count in each."""
    process: int
    """Peak resident set of the largest single process, in bytes, as the kernel counts it."""
    written: int
    """Bytes that all processes handed to `write` and `copy_file_range`."""


class Failed(Exception):
    """The command ended badly; the message holds the end of what it printed."""


def measure(command: Sequence[str], env: Mapping[str, str] | None = None) -> Run:
    """Run to the end. What earlier runs left to be written back is flushed first."""
    os.sync()
    before, began = _handed_to_write(), time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
    ) as child:
        errors = bytearray()
        ended = threading.Event()
        peaks = [0]
        threads = [
            threading.Thread(target=_drain, args=(child, errors)),
            threading.Thread(target=_sample, args=(child.pid, ended, peaks)),
        ]
        for thread in threads:
            thread.start()
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.monotonic() - began
        ended.set()
        for thread in threads:
            thread.join()
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise Failed(f"{' '.join(command)}\nexit code {child.returncode}\n{errors[-3000:].decode(errors='replace')}")
    cpu, written = usage.ru_utime + usage.ru_stime, _handed_to_write() - before
    return Run(wall, cpu, peaks[0], usage.ru_maxrss * 1024, written)


def medians(runs: Sequence[Run]) -> Run:
    """Each figure's median on its own."""
    return Run(*(median(getattr(run, name) for run in runs) for name in Run.__dataclass_fields__))


def in_turn(
    programs: Mapping[str, Sequence[str]], rounds: int, scratch: Path, env: Mapping[str, str]
) -> tuple[dict[str, list[Run]], dict[str, int]]:
    """Run all programs in turn (A B C, B C A, C A B, ...); all runs of each, and the size of what it wrote.

    Each writes into `scratch`, which is emptied after it, outside the timed part.
    """
    return measured_in_turn({name: partial(measure, one, env) for name, one in programs.items()}, rounds, scratch)


def measured_in_turn(
    programs: Mapping[str, Callable[[], Run]], rounds: int, scratch: Path
) -> tuple[dict[str, list[Run]], dict[str, int]]:
    """As `in_turn`, for programs that are measured in a way of their own."""
    runs: dict[str, list[Run]] = {name: [] for name in programs}
    sizes: dict[str, int] = {}
    listed = list(programs.items())
    for number in range(rounds):
        first = number % len(listed)
        for name, program in listed[first:] + listed[:first]:
            run = program()
            runs[name].append(run)
            sizes[name] = size(scratch)
            for left in scratch.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            print(f"  round {number + 1}: {name}: {run.wall:.2f} s, {run.cpu:.2f} CPU s", file=sys.stderr)
    return runs, sizes


def size(path: Path) -> int:
    """Of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def warm(path: Path) -> int:
    """Read a file, or every file in a folder, once, so that the page cache holds it; returns the bytes."""
    total = 0
    for one in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if one.is_file():
            with one.open("rb", buffering=0) as file:
                while nbytes := len(file.read(1 << 22)):
                    total += nbytes
    return total


def _handed_to_write() -> int:
    """Bytes written by this process and by all descendants that were waited for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def _drain(child: subprocess.Popen[bytes], errors: bytearray) -> None:
    assert child.stdout is not None
    while chunk := child.stdout.read1(1 << 16):
        errors += chunk


def _sample(pid: int, ended: threading.Event, peaks: list[int]) -> None:
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    while not ended.wait(_EVERY):
        try:
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        peaks[0] = max(peaks[0], sum(map(_resident, tree)))


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
