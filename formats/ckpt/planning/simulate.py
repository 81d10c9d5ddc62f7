"""A run with failures, event by event: what a schedule wastes when failures are drawn, or are those of a trace.

Nothing here uses the formulas of `waste`. Between two failures the work goes on without surprises, so the state at the
next failure follows from a division, and the time of a simulation grows with its failures, not with its steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.planning.costs import LogCosts, RunCosts
from ckpt_formats.core.errors import InvalidArgumentError

MAX_FAILURES = 1_000_000
_BATCH = 20
"""Failures of one run, of which the spread is stated."""


@dataclass(frozen=True)
class Simulation:
    """What many simulated failures did to a run."""

    failures: int
    waste: float
    """The share of the time that did not advance the run."""
    low: float
    """A run of `batch` failures wastes less than this in 5 of 100 cases; may be negative, since a run can be lucky."""
    high: float
    """A run of `batch` failures wastes more than this in 5 of 100 cases."""
    batch: int
    standard_error: float
    """The standard error of `waste`."""
    redone: float
    """The mean seconds of steps that a failure made the run do again."""
    recovery: float
    """The mean seconds from a failure to the first new step: restart and replay."""


def simulate(
    run: RunCosts, log: LogCosts | None, base_steps: int, flush_steps: int | None, gaps: Iterable[float]
) -> Simulation:
    """Simulate a run that stores bases and, with `log`, flushes its log at these intervals.

    Args:
        run: The costs of the run; its `mtbf` is not used.
        log: The costs of the log; None: bases only.
        base_steps: Steps between bases.
        flush_steps: Steps between flushes of the log; None: never, so failures go back to bases.
        gaps: The seconds between failures, from the start of the run on. A failure can come while the run restarts or
            replays; then it restarts again.

    Raises:
        InvalidArgumentError: There are too few or too many failures.
    """
    timeline = _Timeline(run, log, base_steps, flush_steps)
    walls, steps = list[float](), list[int]()
    redone = recoveries = 0.0
    done = base = 0
    recovery = 0.0
    for gap in gaps:
        if len(walls) == MAX_FAILURES:
            raise InvalidArgumentError(f"more than {MAX_FAILURES:,} failures", where="failures", hint="Simulate fewer.")
        before = done
        if gap > recovery:
            recoveries += recovery
            done, base, repeated = timeline.after(done, base, gap - recovery)
            redone += repeated
            recovery = timeline.recovery(done, base)
        else:
            recoveries += gap
        walls.append(gap)
        steps.append(done - before)
    if len(walls) < 2:
        raise InvalidArgumentError(
            f"{len(walls)} failures are too few to simulate", where="failures", hint="Simulate more."
        )
    return _result(run.step, np.array(walls), np.array(steps, float), redone, recoveries)


@dataclass(frozen=True)
class _Timeline:
    """The course of a run without failures. Its clock counts seconds of work and stalls since step 0."""

    run: RunCosts
    log: LogCosts | None
    base_steps: int
    flush_steps: int | None

    @property
    def _step(self) -> float:
        return self.run.step * (1 + (0.0 if self.log is None else self.log.slowdown))

    @property
    def _flush(self) -> tuple[int, float]:
        """The steps between flushes, at most those between bases, and the stall of a flush."""
        if self.log is None or self.flush_steps is None:
            return self.base_steps, 0.0
        return min(self.flush_steps, self.base_steps), self.log.flush_stall

    @property
    def _cycle(self) -> float:
        """The seconds from a base to the end of the next."""
        every, stall = self._flush
        return self.base_steps * self._step + (self.base_steps - 1) // every * stall + self.run.base_stall

    def clock(self, done: int) -> float:
        """The clock at which a step and its stall are done."""
        every, stall = self._flush
        bases, steps = divmod(done, self.base_steps)
        return bases * self._cycle + steps * self._step + steps // every * stall

    def after(self, done: int, base: int, seconds: float) -> tuple[int, int, float]:
        """The last durable step, and the base to restore, if a failure comes `seconds` after work went on at `done`.

        The third value: the seconds of work that the failure takes away.
        """
        begin, every = self.clock(done), self._flush
        end = begin + seconds
        restorable = math.floor((end - self.run.base_delay) / self._cycle) * self.base_steps
        base = restorable if restorable > done else base
        if self.log is None or self.flush_steps is None:
            durable = base
        else:
            bases, rest = divmod(end, self._cycle)
            flushes = min(int(rest / (every[0] * self._step + every[1])), (self.base_steps - 1) // every[0])
            durable = max(done, int(bases) * self.base_steps + flushes * every[0])
        return durable, base, end - self.clock(durable)

    def recovery(self, done: int, base: int) -> float:
        """The seconds to restart and to replay the steps after the base."""
        return self.run.restart + (0.0 if self.log is None else self.log.replay * (done - base))


def exponential(mtbf: float, failures: int, seed: int = 0) -> np.ndarray:
    """Seconds between failures that come at any time with equal probability: (failures,) float64."""
    return np.random.default_rng(seed).exponential(mtbf, _checked(failures))


def weibull(mtbf: float, shape: float, failures: int, seed: int = 0) -> np.ndarray:
    """Seconds between failures of a Weibull distribution with this mean and shape: (failures,) float64.

    A shape below 1 means that failures come in clusters; 1 is the exponential distribution.
    """
    if not (math.isfinite(shape) and 0.1 <= shape <= 100):
        raise InvalidArgumentError(
            f"{shape!r} cannot be a Weibull shape", where="weibull", hint="State one from 0.1 to 100."
        )
    scale = mtbf / math.gamma(1 + 1 / shape)
    return np.random.default_rng(seed).weibull(shape, _checked(failures)) * scale


def repeated(gaps: Sequence[float], failures: int) -> np.ndarray:
    """The gaps of a trace, repeated or cut to so many failures: (failures,) float64."""
    return np.resize(np.asarray(gaps, np.float64), _checked(failures))


def _checked(failures: int) -> int:
    if not 2 <= failures <= MAX_FAILURES:
        raise InvalidArgumentError(
            f"{failures:,} failures cannot be simulated", where="failures", hint=f"State 2 to {MAX_FAILURES:,}."
        )
    return failures


def _result(step: float, walls: np.ndarray, steps: np.ndarray, redone: float, recoveries: float) -> Simulation:
    """Sums, and the spread over batches. `walls` and `steps`: (failures,) float64, of each failure."""
    failures = len(walls)
    batch = min(_BATCH, failures // 2)
    count = failures // batch
    wall = walls[: count * batch].reshape(count, batch).sum(axis=1)
    useful = steps[: count * batch].reshape(count, batch).sum(axis=1) * step
    total = float(walls.sum())
    waste = 1 - float(steps.sum()) * step / total if total else 1.0
    # The waste is a quotient of two sums: its error is that of the mean of this difference (delta method).
    errors = wall - useful - waste * wall
    error = float(errors.std(ddof=1)) * math.sqrt(count) / max(float(wall.sum()), 1e-300)
    low, high = (float(one) for one in np.quantile(1 - useful / np.maximum(wall, 1e-300), (0.05, 0.95)))
    return Simulation(failures, waste, low, high, batch, error, redone / failures, recoveries / failures)
