"""The core: many runs of one course at once, failure by failure.

A course repeats a period of steps. Its clock counts the seconds of a run without failures, so the state at a failure
follows from a search in one period, and the time of a simulation grows with the failures, not with the steps.
`ckpt.planning.simulate` has the same events for one run and one kind of checkpoint; here there are several places from
which a run may be restored, some of which a failure takes away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import gamma

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.int64]
Seconds = NDArray[np.float64]

MAX_PERIOD = 4_000_000
"""Steps of a period: its clock is an array."""


@dataclass(frozen=True)
class Tier:
    """A place from which the run can be restored, and what that takes."""

    name: str
    every: int
    """Steps between states that can be restored."""
    load: float
    """Seconds from a restart to the first new step, without replay."""
    delay: float = 0.0
    """Seconds after the stall of such a step until its state can be restored."""
    survives: float = 1.0
    """The share of failures after which the place still exists; 1 for the last tier."""
    replay: float = 0.0
    """Seconds to replay a step that is after the base."""
    base_every: int = 0
    """Steps between bases, if states are replayed from them; 0: each state is stored whole."""
    base_delay: float = 0.0


@dataclass(frozen=True)
class Course:
    """What a system makes of a run, as long as nothing fails."""

    step: float
    """Seconds of a step, with the slowdown by the system."""
    tiers: tuple[Tier, ...]
    """From the fastest to the one that is left when all others are lost."""
    stalls: tuple[tuple[int, float], ...] = ()
    """Pairs of steps and seconds: after each so many steps of a period training stops. At one step, the last counts."""
    stored: tuple[tuple[int, float], ...] = ()
    """Pairs of steps and bytes: each so many steps, so many bytes go to durable storage."""
    sent: tuple[tuple[int, float], ...] = ()
    """The same of bytes that other machines keep in memory."""
    notes: tuple[str, ...] = ()

    @cached_property
    def period(self) -> int:
        """Steps after which everything repeats."""
        lengths = [tier.every for tier in self.tiers] + [tier.base_every for tier in self.tiers]
        period = max([*lengths, *(every for every, _ in self.stalls), 1])
        if period > MAX_PERIOD:
            raise ValueError(f"a period of {period:,} steps is too long to simulate")
        return period

    @cached_property
    def clock(self) -> Seconds:
        """Seconds from the start of a period to the end of each step and its stall: (period + 1,) float64."""
        seconds = np.full(self.period, self.step)
        extra = np.zeros(self.period)
        for every, stall in self.stalls:
            extra[every - 1 :: every] = stall
        return np.concatenate([[0.0], np.cumsum(seconds + extra)])

    @property
    def cycle(self) -> float:
        """Seconds of a period."""
        return float(self.clock[-1])

    def at(self, steps: Steps) -> Seconds:
        """The clock at the end of these steps."""
        periods, rest = np.divmod(steps, self.period)
        return periods * self.cycle + self.clock[rest]

    def last(self, every: int, seconds: Seconds) -> Steps:
        """The last multiple of `every` within its period, or the start of a period, whose clock is at most this."""
        periods = np.floor(seconds / self.cycle)
        marks = self.clock[: self.period : every]
        place = np.searchsorted(marks, seconds - periods * self.cycle, "right") - 1
        return periods.astype(np.int64) * self.period + np.maximum(place, 0) * every

    def nbytes_of_second(self, amounts: tuple[tuple[int, float], ...]) -> float:
        """Bytes a second of work."""
        return sum(nbytes * (self.period / every) for every, nbytes in amounts) / self.cycle


@dataclass(frozen=True)
class Outcome:
    """What failures made of a course."""

    failures: int
    effective: float
    """The effective training time ratio: the share of time in which the run advances as if nothing were stored."""
    error: float
    """The standard error of `effective`, from the spread over runs."""
    overhead: float
    """The share of time that the system takes without any failure: slowdown and stalls."""
    repeated: float
    """Mean seconds of work that a failure makes the run do again."""
    repeated_error: float
    recovery: float
    """Mean seconds from a failure to the first new step: restart, load, replay."""
    stored_day: float
    """Bytes a day to durable storage."""
    sent_day: float
    """Bytes a day to the memory of other machines."""


@dataclass
class _Runs:
    """The state of all runs: each array is (runs,)."""

    course: Course
    done: Steps
    recovery: Seconds
    latest: list[Steps] = field(default_factory=list)
    """By tier: the last step that can be restored."""
    bases: list[Steps] = field(default_factory=list)
    """By tier: the base from which that step is replayed."""


def simulate(course: Course, step: float, gaps: Seconds, chances: Seconds, phase: Steps | int = 0) -> Outcome:
    """Let runs fail.

    Args:
        course: What the runs do.
        step: Seconds of a step without any checkpointing.
        gaps: Seconds between the failures of each run: (failures, runs) float64. A failure can come while a run
            restarts; then it restarts again.
        chances: Draws from 0 to 1 that decide which tiers a failure takes: (failures, runs) float64.
        phase: The step of the period at which each run begins; it begins with a restart.
    """
    runs = _start(course, gaps.shape[1], phase)
    begin = runs.done.copy()
    worked, repeated, recovered = (np.zeros(gaps.shape[1]) for _ in range(3))
    for gap, chance in zip(gaps, chances, strict=True):
        work = np.maximum(gap - runs.recovery, 0.0)
        recovered += gap - work
        worked += work
        repeated += _fail(runs, work, chance)
    wall = gaps.sum(axis=0)
    useful = (runs.done - begin) * step
    share, error = _ratio(useful, wall)
    count = gaps.size
    again, again_error = _ratio(repeated, np.full_like(repeated, gaps.shape[0]))
    work_share = float(worked.sum() / wall.sum())
    day = 86_400 * work_share
    return Outcome(
        *(count, share, error, max(0.0, 1 - step * course.period / course.cycle), again, again_error),
        *(float(recovered.sum() / count),),
        *(day * course.nbytes_of_second(course.stored), day * course.nbytes_of_second(course.sent)),
    )


def _start(course: Course, count: int, phase: Steps | int) -> _Runs:
    done = np.broadcast_to(np.asarray(phase, np.int64), (count,)) % course.period
    first = course.tiers[0]
    done = done // first.every * first.every
    runs = _Runs(course, done, np.full(count, first.load))
    for tier in course.tiers:
        runs.latest.append(np.minimum(done, done // tier.every * tier.every))
        runs.bases.append(done // tier.base_every * tier.base_every if tier.base_every else runs.latest[-1])
    return runs


def _fail(runs: _Runs, work: Seconds, chance: Seconds) -> Seconds:
    """Let each run work so many seconds and fail. Returns the seconds of work that are lost."""
    course, going = runs.course, work > 0
    end = course.at(runs.done) + work
    for i, tier in enumerate(course.tiers):
        stored = course.last(tier.every, end - tier.delay)
        latest = np.where(going & (stored > runs.done), stored, runs.latest[i])
        if tier.base_every:
            base = course.last(tier.base_every, end - tier.base_delay)
            runs.bases[i] = np.where(going & (base > runs.done), base, runs.bases[i])
            latest = np.maximum(latest, runs.bases[i])
        runs.latest[i] = latest
    # The fastest tier that survives.
    chosen = np.full(len(work), len(course.tiers) - 1)
    for i in reversed(range(len(course.tiers) - 1)):
        chosen = np.where(chance < course.tiers[i].survives, i, chosen)
    restored = np.choose(chosen, runs.latest)
    recovery = np.zeros_like(work)
    for i, tier in enumerate(course.tiers):
        if tier.base_every:
            runs.bases[i] = np.where(chosen > i, restored, runs.bases[i])
            replay = tier.replay * (restored - runs.bases[i])
        else:
            replay = 0.0
        recovery = np.where(chosen == i, tier.load + replay, recovery)
        runs.latest[i] = np.where(chosen > i, restored, runs.latest[i])
    runs.done, runs.recovery = restored, recovery
    return end - course.at(restored)


def _ratio(above: Seconds, below: Seconds) -> tuple[float, float]:
    """The quotient of two sums over runs, and its standard error (delta method)."""
    ratio = float(above.sum() / below.sum())
    if len(above) < 2:
        return ratio, float("nan")
    spread = float((above - ratio * below).std(ddof=1))
    return ratio, spread * float(np.sqrt(len(above))) / float(below.sum())


def drawn(failures: int, runs: int, seed: int, shape: float = 1.0) -> tuple[Seconds, Seconds, Seconds]:
    """Gaps between failures with mean 1 (Weibull of this shape; 1: exponential), and two arrays of draws from 0 to 1.

    Returns:
        Gaps (failures, runs), chances (failures, runs) and phases (runs,): float64.
    """
    random = np.random.default_rng(seed)
    gaps = random.weibull(shape, (failures, runs)) / gamma(1 + 1 / shape)
    return gaps, random.random((failures, runs)), random.random(runs)
