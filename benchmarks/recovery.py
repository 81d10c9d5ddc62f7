"""A real training is killed: seconds until it trains again, by base only, by base and log, and by a shadow.

    python benchmarks/recovery.py [--width 320] [--layers 8] [--base-every 40] [--rounds 5] [--seed 0]

Each round trains the GPT-like model of `recording.py` on a CPU, in a process of its own. Every N steps it stores a base
twice: with `torch.save`, and in the log (`Bases(every=N)`). A shadow follows the log. The trainer gets SIGKILL at a
random moment between two bases. Then each way restores:

    base only       the file of `torch.save` is loaded; the steps since are trained again
    base and log    `ckpt restore CHAIN`, with 1 and with 2 workers (LowDiff's parallel recovery), then loaded
    shadow          `ckpt restore tcp://...`, then loaded

All three start at once after the kill, one after the other, in an order that changes. Loading is the same in all: model
and optimizer in a new process, without the imports. The weights of the loaded state must have the hash that the trainer
printed at that step; if one differs, the exit code is 1. Seconds are of this machine; compare them with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHAIN = "run.chain"
WAYS = ("base only", "base and log, 1 worker", "base and log, 2 workers", "shadow")
TIMEOUT = 120.0


@dataclass(frozen=True)
class Killed:
    """A training that was killed."""

    folder: Path
    reached: int
    """The last step that was complete."""
    base: int
    """The step of the last base."""
    step: float
    """The median of seconds of a step."""
    digests: dict[int, str]
    """The hash of the weights by step."""
    address: str
    """Of the shadow."""


@dataclass(frozen=True)
class Recovery:
    """What a way took in one round."""

    way: str
    restore: float
    """Seconds until a file is there that the trainer loads."""
    cpu: float
    """CPU seconds of that."""
    load: float
    again: int
    """Steps that must be trained again; negative if the log was ahead of the trainer."""
    step: float
    replayed: int
    """Steps that were replayed."""
    exact: bool

    @property
    def total(self) -> float:
        """Seconds from the kill to where the training was, without the start of the process."""
        return self.restore + self.load + self.again * self.step


# The trainer, and the process that loads


def train(folder: Path, width: int, layers: int, every: int) -> None:
    """Train until killed; print a line for each step."""
    import torch
    from recording import Training

    from ckpt_recorder import Bases, Recorder

    torch.set_num_threads(1)
    training, number = Training(width, layers), 0
    with Recorder(training.model, training.optimizer, folder / CHAIN, bases=Bases(every=every)):
        while True:
            seconds, number = training.step(), number + 1
            if number % every == 0:
                draft = folder / "draft.pt"
                torch.save({**training.state(), "step": number}, draft)
                os.replace(draft, folder / f"{number}.pt")
            print(json.dumps({"step": number, "seconds": seconds, "digest": digest(training.model)}), flush=True)


def load(path: Path, width: int, layers: int) -> None:
    """Load a file into a new model and optimizer; print the seconds, the step, and the hash of the weights."""
    import torch
    from recording import Training

    from ckpt_training import load as load_checkpoint

    torch.set_num_threads(1)
    training = Training(width, layers)
    began = time.perf_counter()
    if path.parent.name == "restored":
        step = load_checkpoint(path, training.model, training.optimizer).step
    else:
        content = torch.load(path, weights_only=True)
        training.model.load_state_dict(content["model"])
        training.optimizer.load_state_dict(content["optimizer"])
        step = content["step"]
    print(json.dumps({"load": time.perf_counter() - began, "step": step, "digest": digest(training.model)}))


def digest(model: Any) -> str:
    from xxhash import xxh3_64

    state = xxh3_64()
    for parameter in model.parameters():
        state.update(parameter.detach().numpy())
    return str(state.hexdigest())


# A round


@contextmanager
def killed(folder: Path, dice: random.Random, width: int, layers: int, every: int) -> Iterator[Killed]:
    """Train, follow with a shadow, and kill the trainer between the second base and the third."""
    last = dice.randint(2 * every, 3 * every - 1)
    trainer = started(__file__, "--train", folder, "--width", width, "--layers", layers, "--base-every", every)
    shadow = None
    try:
        lines: list[dict[str, Any]] = []
        assert trainer.stdout is not None
        while len(lines) < last:
            line = trainer.stdout.readline()
            if not line:
                raise RuntimeError("the trainer ended")
            lines.append(json.loads(line))
            if shadow is None and (folder / CHAIN / "chain.json").exists():
                shadow = started("-m", "ckpt_cli", "shadow", folder / CHAIN, "--listen", "127.0.0.1:0", "--json")
        assert shadow is not None
        assert shadow.stdout is not None
        event = json.loads(shadow.stdout.readline())
        step = statistics.median(line["seconds"] for line in lines)
        time.sleep(dice.random() * step)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        lines += [json.loads(line) for line in trainer.stdout if line.endswith("\n")]
        reached = lines[-1]["step"]
        digests = {line["step"]: line["digest"] for line in lines}
        yield Killed(folder, reached, reached // every * every, step, digests, event["address"])
    finally:
        for process in (trainer, shadow):
            if process is not None:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def recover(run: Killed, way: str, width: int, layers: int) -> Recovery:
    """Restore and load by one way."""
    began, before = time.perf_counter(), os.times()
    if way == "base only":
        path = max(run.folder.glob("[0-9]*.pt"), key=lambda path: int(path.stem))
    else:
        path = run.folder / "restored" / "state.pt"
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        source = run.address if way == "shadow" else run.folder / CHAIN
        workers = 2 if way.endswith("2 workers") else 1
        restore(source, path, workers)
    seconds, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    loaded = json.loads(finished(__file__, "--load", path, "--width", width, "--layers", layers))
    step = loaded["step"]
    exact = run.digests.get(step, loaded["digest"] if step == run.reached + 1 else "") == loaded["digest"]
    return Recovery(
        *(way, seconds if way != "base only" else 0.0, cpu if way != "base only" else 0.0, loaded["load"]),
        *(run.reached - step, run.step, step - run.base if way.startswith("base and") else 0, exact),
    )


def replay_seconds(run: Killed, workers: int, repeats: int = 3) -> float:
    """Seconds of replay alone: the least of a restore, less the least of a restore of the base, in turn."""
    seconds: dict[str, list[float]] = {"": [], f"@{run.base}": []}
    for _ in range(repeats):
        for step, measured in seconds.items():
            began = time.perf_counter()
            restore(f"{run.folder / CHAIN}{step}", run.folder / f"replay-{len(measured)}{step}-{workers}.pt", workers)
            measured.append(time.perf_counter() - began)
    whole, base = (min(measured) for measured in seconds.values())
    return whole - base


def restore(source: object, target: Path, workers: int) -> None:
    finished("-m", "ckpt_cli", "restore", source, target, "--to", "torch", "--workers", workers)


def started(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def finished(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


# The table


def show(rounds: list[list[Recovery]], replays: list[dict[int, float]]) -> None:
    """Means of the rounds; ratios to base only."""
    print(
        f"{'':26}{'restored s':>11}{'CPU s':>8}{'loaded s':>10}{'steps again':>13}{'their s':>9}{'in all s':>10}"
        f"{'beside base only':>18}"
    )
    mean = {way: [one for each in rounds for one in each if one.way == way] for way in WAYS}
    usual = statistics.fmean(one.total for one in mean["base only"])
    for way, ones in mean.items():
        total = statistics.fmean(one.total for one in ones)
        figures = [statistics.fmean(x) for x in zip(*((o.restore, o.cpu, o.load, o.again) for o in ones), strict=True)]
        repeated = statistics.fmean(one.again * one.step for one in ones)
        print(
            f"{way:26}{figures[0]:11.2f}{figures[1]:8.2f}{figures[2]:10.2f}{figures[3]:13.1f}{repeated:9.2f}{total:10.2f}"
            f"{total / usual:17.3f}x"
        )
    replayed = statistics.fmean(one.replayed for one in mean[WAYS[1]])
    first, second = (statistics.fmean(one[workers] for one in replays) for workers in (1, 2))
    print(f"{replayed:.0f} steps replayed, without the base: 1 worker {first:.2f} s, 2 workers {second:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--base-every", type=int, default=40, metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where logs and bases are written")
    parser.add_argument("--json", action="store_true", help="each recovery as a line")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = (options.width, options.layers)
    if options.train:
        train(options.train, *model, options.base_every)
    if options.load:
        load(options.load, *model)
        return 0
    dice, rounds, replays = random.Random(options.seed), [], []
    for number in range(options.rounds):
        with (
            tempfile.TemporaryDirectory(dir=options.folder) as name,
            killed(Path(name), dice, *model, options.base_every) as run,
        ):
            order = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            rounds.append([recover(run, way, *model) for way in order])
            replays.append({workers: replay_seconds(run, workers) for workers in (1, 2) if not options.json})
        for one in rounds[-1]:
            fields = {**vars(one), "total": one.total, "reached": run.reached}
            exact = "" if one.exact else "; DIFFERENT WEIGHTS"
            text = f"round {number}: {one.way:24} {one.again:4} of {run.reached} steps again{exact}"
            print(json.dumps(fields) if options.json else text, flush=True)
    if not options.json:
        print(f"steps of {statistics.median(one.step for each in rounds for one in each) * 1e3:.0f} ms")
        show(rounds, replays)
    return int(not all(one.exact for each in rounds for one in each))


if __name__ == "__main__":
    sys.exit(main())
