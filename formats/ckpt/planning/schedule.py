"""The plan of a run: how often to store bases and to flush the log, what that costs, and what other intervals cost."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

from ckpt.planning.costs import DataRates, LogCosts, RunCosts
from ckpt.planning.search import best_bases, best_logged, max_steps
from ckpt.planning.waste import (
    daly_seconds,
    expected_seconds,
    expected_seconds_logged,
    young_seconds,
)
from ckpt_formats.core.arguments import MAY_BE_INFINITE, Checked, Count, checked
from ckpt_formats.core.errors import UnsupportedError

DAY = 86_400.0
_HOPELESS = 0.999
"""A run that wastes a larger share of its time makes no progress that a plan could state."""


@dataclass(frozen=True)
class Schedule(Checked):
    """When a run stores what: the intervals, and what is expected of them."""

    base_steps: Count
    """Steps between bases."""
    flush_steps: Count | None
    """Steps between flushes of the log; None without a log."""
    waste: Annotated[float, MAY_BE_INFINITE]
    """The share of time that does not advance the run: recording, stalls, restarts, replay, and steps done again."""
    seconds: Annotated[float, MAY_BE_INFINITE]
    """The expected time from a base to the next, with failures."""
    day_nbytes: Annotated[float, MAY_BE_INFINITE] | None
    """Bytes written on a day; None if the bytes of a base or of a step are not known."""


@dataclass(frozen=True)
class FailurePlan(Checked):
    """The best schedules of a run, and the intervals of Young and Daly to compare them with."""

    run: RunCosts
    log: LogCosts | None
    rates: DataRates
    bases: Schedule
    """Without a log."""
    logged: Schedule | None
    """With a log; None if no costs of a log are known."""
    young: Schedule
    """Without a log, at Young's interval."""
    daly: Schedule
    """Without a log, at Daly's interval."""
    min_base_steps: Count
    """Steps in which a base can be written, without a log: the interval is not shorter."""
    min_logged_steps: Count
    """The same with a log, which uses a part of the write rate."""
    replay_cores: Count | None
    """The cores that replay steps as fast as the run takes them, as a shadow of the run must; None: not known."""

    def __repr__(self) -> str:
        best = self.best
        log = "without a log" if best.flush_steps is None else f"flushes each {best.flush_steps:,}"
        return f"<FailurePlan: a base each {best.base_steps:,} steps, {log}, waste {best.waste:.3g}>"

    @property
    def log_pays(self) -> bool:
        """Is the waste with a log lower than without?"""
        return self.logged is not None and self.logged.waste < self.bases.waste

    @property
    def best(self) -> Schedule:
        return self.logged if self.logged is not None and self.log_pays else self.bases

    def gain(self, other: Schedule) -> float:
        """The share of the time that the run takes with `other` which the best schedule saves."""
        return 1 - (1 - other.waste) / (1 - self.best.waste)


@checked
def plan_schedule(run: RunCosts, log: LogCosts | None = None, rates: DataRates | None = None) -> FailurePlan:
    """The schedules with the lowest waste that the write rate allows.

    Raises:
        UnsupportedError: The log has more bytes than can be written, or no interval makes progress.
    """
    rates = rates or DataRates()
    lowest = _steps_to_write(run, run.step, 0.0, rates)
    slow_step = run.step * (1 + (0.0 if log is None else log.slowdown))
    bases = bases_schedule(run, best_bases(run, lowest), rates)
    lowest_logged = lowest if log is None else _steps_to_write(run, slow_step, rates.step_nbytes or 0.0, rates)
    logged = None if log is None else logged_schedule(run, log, *best_logged(run, log, lowest_logged), rates)
    applying = replace(rates, cores=1.0).replay_parts[1]
    plan = FailurePlan(
        run=run,
        log=log,
        rates=rates,
        bases=bases,
        logged=logged,
        young=bases_schedule(run, _steps(run, young_seconds(run), lowest), rates),
        daly=bases_schedule(run, _steps(run, daly_seconds(run), lowest), rates),
        min_base_steps=lowest,
        min_logged_steps=lowest_logged,
        replay_cores=None if applying is None else math.ceil(applying / slow_step),
    )
    if plan.best.waste > _HOPELESS:
        raise UnsupportedError(
            f"no interval makes progress: {plan.best.waste:.2%} of the time is wasted at best",
            where="mtbf",
            hint="Failures are too frequent for these stalls, restarts and steps.",
        )
    return plan


def bases_schedule(run: RunCosts, base_steps: int, rates: DataRates) -> Schedule:
    """What is expected of an interval between bases, without a log."""
    seconds = expected_seconds(run, base_steps)
    return _schedule(run, base_steps, None, seconds, rates.base_nbytes)


def logged_schedule(run: RunCosts, log: LogCosts, base_steps: int, flush_steps: int, rates: DataRates) -> Schedule:
    """What is expected of intervals between bases and between flushes, with a log."""
    seconds = expected_seconds_logged(run, log, base_steps, flush_steps)
    nbytes = None
    if rates.base_nbytes is not None and rates.step_nbytes is not None:
        nbytes = rates.base_nbytes + base_steps * rates.step_nbytes
    return _schedule(run, base_steps, flush_steps, seconds, nbytes)


def _schedule(
    run: RunCosts, base_steps: int, flush_steps: int | None, seconds: float, nbytes: float | None
) -> Schedule:
    waste = max(0.0, 1 - base_steps * run.step / seconds)  # rounding can take it below 0
    return Schedule(base_steps, flush_steps, waste, seconds, None if nbytes is None else nbytes * DAY / seconds)


def _steps(run: RunCosts, seconds: float, lowest: int) -> int:
    return max(lowest, min(max_steps(run), round(seconds / run.step)))


def _steps_to_write(run: RunCosts, step: float, step_nbytes: float, rates: DataRates) -> int:
    """The steps from a base to the next in which all bytes can be written: k t + C >= (S + k G) / W for bases of S
    bytes, steps of G bytes and the write rate W. Raises `UnsupportedError` if the log alone is too much."""
    lowest = max(1, math.ceil(run.base_delay / step))
    if rates.write_rate is None:
        return lowest
    free = rates.write_rate * step - step_nbytes
    if free <= 0:
        raise UnsupportedError(
            f"a step adds {step_nbytes:.4g} bytes to the log, but only {rates.write_rate * step:.4g} can be written "
            f"while it runs ({rates.write_rate:.4g} bytes a second)",
            where="write_rate",
            hint="Log to a faster or local disk, store gradients with the codec int8 or bf16, or plan bases alone.",
        )
    steps = ((rates.base_nbytes or 0.0) - rates.write_rate * run.base_stall) / free
    if steps > 1 << 53:
        raise UnsupportedError(
            "the log leaves no write rate for bases", where="write_rate", hint="Log to a faster or local disk."
        )
    return max(lowest, math.ceil(steps))
