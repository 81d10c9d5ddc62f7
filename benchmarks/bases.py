"""How long training waits for bases that are copied in the background, beside the formula max(0, S/B - Tc).

    python benchmarks/bases.py [--rounds 5] [--only simulate | record]

S: the bytes of the state. B: the bytes a second of a copy. Tc: the seconds of forward and backward. U: of the update.

1. `simulate`: the copier's pieces, the ring, the update and the staging as events, with figures of models on GPUs.
2. `record`: a real recorder, whose copies are made as slow as B says; forward and backward take Tc, on a clock, so that
   other programs on the machine count little. At once: the wait of the update. Rolling: of all updates of a base.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_codecs.base import Array
from ckpt_recorder import Bases, Recorder
from ckpt_training import copies as copying

_NEVER = 10**6
"""Steps between bases: the benchmark says when one begins."""


@dataclass(frozen=True)
class Setting:
    """One model on one GPU, in bytes, bytes a second and seconds. Sources: results/recording.md."""

    name: str
    state: float
    bandwidth: float
    forward_backward: float
    update: float
    device_bandwidth: float = 1.5e12
    pieces: int = 64


SETTINGS = [
    Setting("GPT2-XL, 1 GPU", 21e9, 45e9, 0.400, 0.033),
    Setting("GPT2-XL, 1 GPU, slow link", 21e9, 20e9, 0.400, 0.033),
    Setting("Llama-7B, FSDP 8", 11.7e9, 45e9, 1.68, 0.06),
    Setting("Llama-7B, FSDP 8, slow link", 11.7e9, 5e9, 1.68, 0.06),
    Setting("70B, FSDP 64", 15.3e9, 45e9, 9.0, 0.1),
]


def simulate_wait(one: Setting, calls: int = 1) -> float:
    """The seconds by which a step takes longer. Each call of the optimizer waits for its own pieces.

    `calls`: 1 for one call for all tensors; more for engines that step sub-groups, one after the other.
    """
    copied = [(number + 1) * one.state / one.pieces / one.bandwidth for number in range(one.pieces)]
    now = one.forward_backward
    for call in range(calls):
        last = (call + 1) * one.pieces // calls - 1
        now = max(now, copied[last]) + one.update / calls
    return now - one.forward_backward - one.update


def simulate_staged(one: Setting) -> tuple[float, float]:
    """The same if late pieces are copied on the device first: the seconds, and the bytes of the largest buffer.

    At the update, the pieces that the thread has not begun are staged. The update waits for that and for the piece in
    flight; the rest is copied while the next step runs.
    """
    each = one.state / one.pieces
    started = min(one.pieces, int(one.forward_backward * one.bandwidth / each) + 1)
    staged = (one.pieces - started) * each
    in_flight = started * each / one.bandwidth - one.forward_backward
    return max(0.0, in_flight, staged / one.device_bandwidth), staged


def wait_formula(one: Setting) -> float:
    """max(0, S/B - Tc)"""
    return max(0.0, one.state / one.bandwidth - one.forward_backward)


def staged_formula(one: Setting) -> float:
    """L/H, L = max(0, S - B Tc)"""
    return max(0.0, one.state - one.bandwidth * one.forward_backward) / one.device_bandwidth


class SlowCopies(copying.HostCopies):
    """Copies of a bandwidth: after each piece, the thread sleeps until the bytes could have been copied.

    A delay of the thread by other programs is made up for by the next piece.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self.until = 0.0
        """When all bytes so far could have been copied. It is set to the moment when copies of a step begin."""

    def copy(self, targets: Sequence[Array], sources: Sequence[torch.Tensor], after: Any) -> None:
        super().copy(targets, sources, after)
        self.until += sum(target.nbytes for target in targets) / self._bandwidth
        time.sleep(max(0.0, self.until - time.perf_counter()))


class Clock:
    """The moments when copies begin and updates begin to wait, so the real Tc of a loaded machine."""

    def __init__(self, bases: Any, copies: SlowCopies) -> None:
        self.begin, self.times = 0.0, list[float]()
        copy_next, wait = bases.copy_next, bases.wait

        def timed_copy(step: int) -> None:
            self.begin = copies.until = time.perf_counter()
            copy_next(step)

        def timed_wait(tensors: frozenset[int]) -> float:
            self.times.append(time.perf_counter() - self.begin)
            return float(wait(tensors))

        bases.copy_next, bases.wait = timed_copy, timed_wait


def record(base: str, bandwidth: float, seconds: float, rounds: int, width: int, spread: int) -> dict[str, Any]:
    """Measured waits of a recorder with a limited bandwidth, and what the formula gives: medians over the rounds."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    state = 3 * sum(parameter.nbytes for parameter in model.parameters())
    copies = SlowCopies(bandwidth)
    copying.copies_of = lambda device: copies  # type: ignore[assignment]
    rows = []
    bases_of_run = Bases(every=_NEVER, spread=spread, memory=1 << 30)
    with (
        tempfile.TemporaryDirectory() as folder,
        Recorder(
            model, optimizer, Path(folder) / "run.chain", bases=bases_of_run, fingerprint=0, random_states=False
        ) as recorder,
    ):
        optimizer.step()
        schedule = recorder._run.bases
        assert schedule is not None
        assert schedule.process is not None
        bases = schedule.process
        clock = Clock(bases, copies)
        for _ in range(rounds):
            while not bases.is_ready:
                optimizer.step()
                time.sleep(0.05)
            schedule._from = recorder.step + 1 - _NEVER
            optimizer.step()
            assert schedule._making_since == recorder.step
            clock.times.clear()
            for _ in range(spread):
                time.sleep(max(0.0, clock.begin + seconds - time.perf_counter()))  # forward and backward
                optimizer.step()
            formula = sum(max(0.0, state / spread / bandwidth - each) for each in clock.times)
            rows.append((bases.waited, formula, statistics.mean(clock.times or [seconds])))
        nbytes = bases.nbytes
    measured, formula, real = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "base": base,
        "state MB": state / 1e6,
        "B MB/s": bandwidth / 1e6,
        "Tc ms": real * 1e3,
        "measured ms": measured * 1e3,
        "formula ms": formula * 1e3,
        "ratio": measured / formula if formula else None,
        "ring MB": nbytes / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--only", choices=("simulate", "record"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    if arguments.only != "record":
        columns = (
            f"{'wait ms':>8} {'formula':>8} {'ratio':>6} {'16 calls':>8} {'staged':>7} {'L/H':>6} {'buffer GB':>9}"
        )
        print(f"{'simulated':28} {columns}")
        for one in SETTINGS:
            wait, formula, (staged, buffer) = simulate_wait(one), wait_formula(one), simulate_staged(one)
            ratio = f"{wait / formula:6.3f}" if formula else "     -"
            print(
                f"{one.name:28} {wait * 1e3:8.1f} {formula * 1e3:8.1f} {ratio} {simulate_wait(one, 16) * 1e3:8.1f}"
                f" {staged * 1e3:7.1f} {staged_formula(one) * 1e3:6.1f} {buffer / 1e9:9.2f}"
            )
    if arguments.only != "simulate":
        columns = f"{'S MB':>6} {'B MB/s':>7} {'Tc ms':>6} {'wait ms':>8} {'formula':>8} {'ratio':>6} {'ring MB':>8}"
        print(f"{'recorded':9} {columns}")
        settings = [("at once", 1, b, t) for b, t in itertools.product((20e6, 40e6), (0.1, 0.5))]
        settings += [("at once", 1, 400e6, 0.5)]
        settings += [("rolling", 8, b, t) for b, t in ((10e6, 0.02), (10e6, 0.2), (400e6, 0.2))]
        for base, spread, bandwidth, seconds in settings:
            row = record(base, bandwidth, seconds, arguments.rounds, arguments.width, spread)
            rows.append(row)
            ratio = f"{row['ratio']:6.3f}" if row["ratio"] is not None else "     -"
            print(
                f"{base:9} {row['state MB']:6.1f} {row['B MB/s']:7.0f} {row['Tc ms']:6.0f} {row['measured ms']:8.1f}"
                f" {row['formula ms']:8.1f} {ratio} {row['ring MB']:8.1f}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
