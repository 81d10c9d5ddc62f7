"""Does `ckpt plan` state what failures cost? `python benchmarks/planning_failures.py [--failures 20000] [--seed 0]`.

A grid of runs: for each, the waste that the plan expects of its best schedules, and the waste of a simulation with
failures that are drawn. Each run gets failures of its own. Also the waste where failures come in clusters (Weibull,
shape 0.7), which the formulas do not know. Prints a table, and the largest difference; exits with 1 above 2 %.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.planning.costs import LogCosts, RunCosts
from ckpt.planning.schedule import plan_schedule
from ckpt.planning.simulate import exponential, simulate, weibull

GOAL = 0.02
MTBF = (600.0, 1800.0, 10_800.0, 43_200.0)
BASES = ((20.0, 0.0), (2.0, 40.0), (0.1, 0.0))
"""Stall of a base, and the time until it can be restored: written at once, in the background, and by a shadow."""
REPLAY = (0.5, 0.05, 0.0)
STEP, RESTART, SLOWDOWN, FLUSH = 0.8, 60.0, 0.01, 0.05


@dataclass(frozen=True)
class Row:
    """A run, what the plan expects, and what a simulation gave: shares of the time."""

    run: RunCosts
    log: LogCosts
    pays: bool
    expected: tuple[float, float]
    """Without and with a log."""
    simulated: tuple[float, float]
    errors: tuple[float, float]
    """Standard errors of `simulated`."""
    clustered: tuple[float, float]

    @property
    def differences(self) -> tuple[float, float]:
        """Expected by simulated waste, less 1."""
        bases, logged = (a / b - 1 for a, b in zip(self.expected, self.simulated, strict=True))
        return bases, logged


def grid() -> list[tuple[RunCosts, LogCosts]]:
    """36 runs."""
    return [
        (RunCosts(STEP, mtbf, stall, RESTART, delay), LogCosts(replay * STEP, SLOWDOWN, FLUSH))
        for mtbf, (stall, delay), replay in itertools.product(MTBF, BASES, REPLAY)
    ]


def rows(failures: int, seed: int, numbers: list[int] | None = None) -> Iterator[Row]:
    """The rows of the grid with these numbers; None: all."""
    for number, (run, log) in enumerate(grid()):
        if numbers is not None and number not in numbers:
            continue
        plan = plan_schedule(run, log)
        one = plan.logged
        assert one is not None
        gaps = exponential(run.mtbf, failures, seed + number).tolist()
        clusters = weibull(run.mtbf, 0.7, failures, seed + number).tolist()
        bases, logged = (
            (
                simulate(run, None, plan.bases.base_steps, None, drawn),
                simulate(run, log, one.base_steps, one.flush_steps, drawn),
            )
            for drawn in (gaps, clusters)
        )
        yield Row(
            *(run, log, plan.log_pays, (plan.bases.waste, one.waste)),
            *((bases[0].waste, bases[1].waste), (bases[0].standard_error, bases[1].standard_error)),
            (logged[0].waste, logged[1].waste),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{'mtbf  stall  delay  replay':>30} | {'bases: plan  simulated  differs  error':>40} | log: the same")
    worst = 0.0
    for row in rows(options.failures, options.seed):
        parts = []
        for expected, simulated, difference, error in zip(
            row.expected, row.simulated, row.differences, row.errors, strict=True
        ):
            worst = max(worst, abs(difference))
            parts.append(f"{expected:12.3%} {simulated:10.3%} {difference:+8.2%} {error / simulated:6.2%}")
        costs = f"{row.run.mtbf:7.0f} {row.run.base_stall:6.1f} {row.run.base_delay:6.1f} {row.log.replay:7.3f}"
        clusters = f"clusters {row.clustered[0]:.3%} {row.clustered[1]:.3%}"
        print(f"{costs} | {' | '.join(parts)} {'pays' if row.pays else ''}; {clusters}")
    print(f"largest difference {worst:.2%}, goal {GOAL:.0%}, {options.failures:,} failures each")
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main())
