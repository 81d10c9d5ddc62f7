"""What a run notices of a shadow on another core: a recorded GPT-like model on CPU, with a shadow and without.

    python benchmarks/shadow_beside.py [--width 320] [--layers 8] [--blocks 40] [--steps 15] [--way files|socket]

The trainer has a core to itself, and computes with one thread; the process that writes the log, and the shadow, have
another one. In every second block of steps the shadow (and the server of the log) is stopped by a signal. In the
others it also does the steps of the block before, so it works twice as much as beside a run that is not measured.
Medians of wall and of CPU seconds of the trainer's steps are compared, pair by pair. The wall clock says something on a
machine without other work only; the CPU seconds say what the shadow takes from the trainer's caches and memory.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import IO

import torch
from recording import Training

from ckpt_recorder import Recorder


class Command:
    """`ckpt` in a process of its own, on some cores. Each line that it prints is an event."""

    def __init__(self, arguments: list[str], cores: set[int], output_path: Path) -> None:
        self._output: IO[bytes] = output_path.open("w+b")
        command = [sys.executable, "-m", "ckpt_cli", *arguments, "--json"]
        self.process = subprocess.Popen(command, stdout=self._output)
        os.sched_setaffinity(self.process.pid, cores)

    def events(self) -> list[dict[str, object]]:
        self._output.seek(0)
        return [json.loads(line) for line in self._output.read().splitlines(keepends=True) if line.endswith(b"\n")]

    def send(self, number: int) -> None:
        self.process.send_signal(number)


def step(training: Training) -> tuple[float, float]:
    """Wall and CPU seconds of one step."""
    began, cpu = time.perf_counter(), time.process_time()
    training.step()
    return time.perf_counter() - began, time.process_time() - cpu


def wait_for(command: Command, step: int) -> None:
    """Wait until the shadow is at a step."""
    deadline = time.monotonic() + 120
    while not any(event.get("step") == step for event in command.events()[-3:]):
        assert command.process.poll() is None
        assert time.monotonic() < deadline, command.events()[-1]
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("width", 320), ("layers", 8), ("blocks", 40), ("steps", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--way", choices=("files", "socket"), default="files")
    given = parser.parse_args()
    own, *others = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    training = Training(given.width, given.layers)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        commands, recorder = list[Command](), Recorder(training.model, training.optimizer, place / "run.chain")
        try:
            os.sched_setaffinity(0, {own})
            os.sched_setaffinity(recorder.writer_pid or 0, others or {own})
            for _ in range(5):
                training.step()
            cores = set(others or {own})
            chain = str(place / "run.chain")
            if given.way == "socket":
                commands.append(Command(["serve", chain, "--listen", "0"], cores, place / "serve.said"))
                while not commands[0].events():
                    time.sleep(0.05)
                chain = str(commands[0].events()[0]["address"])
            commands.append(Command(["shadow", chain, "--workers", "1"], cores, place / "shadow.said"))
            wait_for(commands[-1], recorder.step)
            measurements: dict[str, list[tuple[float, float]]] = {"alone": [], "beside a shadow": []}
            for number in range(given.blocks):
                beside = number % 2 == 1
                for command in commands:
                    command.send(signal.SIGCONT if beside else signal.SIGSTOP)
                rows = [step(training) for _ in range(given.steps)]
                measurements["beside a shadow" if beside else "alone"].append(
                    (median(wall for wall, _ in rows), median(cpu for _, cpu in rows))
                )
            wait_for(commands[-1], recorder.step)
            recorder.close()
        finally:
            for command in commands:
                command.send(signal.SIGCONT)
                command.process.kill()
                command.process.wait()
        last = commands[-1].events()[-1]
    ratios = []
    for kind in range(2):
        pairs = zip(measurements["alone"], measurements["beside a shadow"], strict=True)
        ratios.append(median(after[kind] / before[kind] for before, after in pairs))
    row = {"parameters": training.numel, "way": given.way, "cores": 1 + len(others)}
    row |= {name: f"{1e3 * median(wall for wall, _ in rows):.1f} ms" for name, rows in measurements.items()}
    more = [f"{100 * ratio - 100:+.2f} %" for ratio in ratios]
    print(json.dumps({**row, "a step's wall time": more[0], "its CPU time": more[1], "shadow at": last["step"]}))


if __name__ == "__main__":
    main()
