"""Record a tiny model for many steps: is all that reads the log linear in them, and is memory flat?

    python benchmarks/recording_lengths.py [--steps 5000 10000 20000] [--trainers replay update]

Each run is recorded in a process of its own. While it trains, the resident memory of the trainer, its writer and its
prover is read at quarters of the run. Then `ckpt log`, `restore` of the last step and `verify --replay` run in turn:
CPU seconds, and the most memory that the process had.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from ckpt_recorder import Recorder

TRAINERS = ("replay", "update")
PARTS = 4
"""How often memory is read in a run."""


def record(chain: Path, trainer: str, steps: int) -> None:
    """Train with buffers, random numbers, notes and a schedule."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dtype = torch.float32 if trainer == "replay" else torch.bfloat16
    model = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 8)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    began = time.perf_counter()
    with Recorder(model, optimizer, chain) as recorder:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(torch.randn(16, 24, dtype=dtype)).square().mean().backward()
            optimizer.step()
            schedule.step()
            recorder.note(schedule=schedule)
            if step % (steps // PARTS) == 0:
                seconds, began = time.perf_counter() - began, time.perf_counter()
                shown = ", ".join(f"{name} {resident / 1e6:.1f} MB" for name, resident in processes())
                print(f"  step {step:6}: {seconds / (steps // PARTS) * 1e3:.2f} ms a step; {shown}", flush=True)


def processes() -> list[tuple[str, int]]:
    """The resident memory of this process and of those that it started, in bytes."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    usage = [("trainer", resident("self"))]
    for pid in children:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        name = next(
            (part.removeprefix("ckpt_recorder.") for part in command if part.startswith("ckpt_rec")), command[0]
        )
        usage.append((name, resident(pid)))
    return usage


def resident(pid: str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


CALL = """
import re, sys
from pathlib import Path
from ckpt_cli.main import run
try:
    run()
finally:
    print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def measured(*arguments: object) -> tuple[float, int]:
    """The CPU seconds of a command, and the most memory that it had, in bytes."""
    before = os.times()
    done = subprocess.run([sys.executable, "-c", CALL, *map(str, arguments)], capture_output=True, text=True)
    after = os.times()
    if done.returncode:
        raise SystemExit(f"{arguments} failed: {done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, int(done.stdout.splitlines()[-1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[5000, 10000, 20000])
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lengths-"))
    for trainer in options.trainers:
        for steps in options.steps:
            chain = folder / f"{trainer}-{steps}.chain"
            print(f"{trainer}, {steps} steps", flush=True)
            pid = os.fork()
            if not pid:
                record(chain, trainer, steps)
                os._exit(0)
            if os.waitpid(pid, 0)[1]:
                raise SystemExit("the run failed")
            size = sum(path.stat().st_size for path in chain.rglob("*") if path.is_file())
            print(f"  the log has {size / 1e6:.1f} MB, {size / steps:,.0f} B a step", flush=True)
            for command in (("log", chain), ("restore", chain, folder / "out"), ("verify", chain, "--replay")):
                cpu, memory = measured(*command)
                print(f"  {command[0]:8} {cpu:6.2f} s CPU, {memory / 1e6:6.1f} MB", flush=True)
                shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
