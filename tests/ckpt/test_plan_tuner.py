"""Intervals that follow a run: in a simulated day whose rates change, they waste no more than the best fixed ones."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from ckpt.planning.costs import LogCosts, RunCosts
from ckpt.planning.search import best_logged
from ckpt.planning.tuner import IntervalTuner
from ckpt_formats.core.errors import InvalidArgumentError

DAY = 86_400.0
MTBF, RESTART, REPLAY = 3600.0, 90.0, 0.1


@dataclass(frozen=True)
class Rates:
    """What steps and stalls take from a time of the day on, in seconds."""

    since: float
    step: float
    base: float
    flush: float


CALM = (Rates(0, 4.0, 20.0, 0.5),)
CHANGING = (
    Rates(0, 4.0, 20.0, 0.5),
    Rates(5 * 3600, 4.0, 90.0, 3.0),  # others use the disk
    Rates(9 * 3600, 8.0, 90.0, 3.0),  # and longer sequences begin
    Rates(14 * 3600, 2.0, 6.0, 0.1),
    Rates(19 * 3600, 4.0, 20.0, 0.5),
)


class Fixed:
    """Intervals that never change, with the interface of the tuner."""

    def __init__(self, base_steps: int, flush_steps: int) -> None:
        self.base_steps, self.flush_steps = base_steps, flush_steps

    def step_took(self, seconds: float) -> None: ...

    base_took = flush_took = step_took


def day(tuner: IntervalTuner | Fixed, course: tuple[Rates, ...], failures: list[float]) -> float:
    """The waste of a day: the share of its time that is not that of steps which are durable at its end.

    It starts with a base. Steps are measured with 5 % of noise.
    """
    noise = np.random.default_rng(5).uniform(0.95, 1.05, 50_000).tolist()
    starts, number, clock, useful, fresh = [one.since for one in course], 0, 0.0, 0.0, True
    replay, done = 0.0, 0  # to get back to the last durable step, and how many steps after the base it is
    for failure in [*failures, DAY]:
        volatile, steps, flushed = 0.0, 0, 0  # seconds of steps since the last flush; steps since the base
        if not fresh:
            clock += RESTART + replay
            steps = flushed = done
            if clock >= failure:  # it restarts again
                clock = failure
                continue
        while True:
            rates = course[bisect.bisect_right(starts, clock) - 1]
            if fresh or steps >= tuner.base_steps:
                stall = rates.base
                if clock + stall > failure:
                    break
                clock += stall
                tuner.base_took(stall)
                useful, volatile, replay, steps, flushed, fresh = useful + volatile, 0.0, 0.0, 0, 0, False
            elif steps - flushed >= tuner.flush_steps:
                if clock + rates.flush > failure:
                    break
                clock += rates.flush
                tuner.flush_took(rates.flush)
                useful, volatile, flushed = useful + volatile, 0.0, steps
                replay = REPLAY * rates.step * steps
            seconds, number = rates.step * noise[number % len(noise)], number + 1
            if clock + seconds > failure:
                break
            clock, volatile, steps = clock + seconds, volatile + seconds, steps + 1
            tuner.step_took(seconds)
        clock, done = failure, flushed
    return 1 - useful / DAY


def mean_waste(intervals: Callable[[], IntervalTuner | Fixed], course: tuple[Rates, ...]) -> float:
    """Over four days, with failures that are the same for all intervals."""
    wastes = []
    for seed in range(4):
        times = np.cumsum(np.random.default_rng(seed).exponential(MTBF, 200))
        wastes.append(day(intervals(), course, times[times < DAY].tolist()))
    return float(np.mean(wastes))


@pytest.fixture(scope="module")
def best_fixed() -> dict[tuple[Rates, ...], float]:
    """The lowest waste of fixed intervals, over a grid around the best."""
    return {
        course: min(
            mean_waste(lambda k=k, b=b: Fixed(k, b), course)  # type: ignore[misc]
            for k in (180, 220, 260, 300, 350, 420)
            for b in (9, 11, 13, 15, 18)
        )
        for course in (CALM, CHANGING)
    }


@pytest.mark.parametrize("course", [CALM, CHANGING], ids=["calm", "changing"])
def test_auto_wastes_at_most_5_percent_more_than_the_best_fixed_intervals(
    course: tuple[Rates, ...], best_fixed: dict[tuple[Rates, ...], float]
) -> None:
    auto = mean_waste(lambda: IntervalTuner(MTBF, RESTART, REPLAY), course)
    print(f"auto {auto:.3%}, best fixed {best_fixed[course]:.3%}")
    assert auto <= 1.05 * best_fixed[course]


def test_the_intervals_are_those_of_a_plan_and_follow_what_is_measured() -> None:
    tuner = IntervalTuner(MTBF, RESTART, REPLAY)
    assert (tuner.base_steps, tuner.flush_steps, tuner.plans) == (1, 1, 0)
    tuner.step_took(4.0)
    assert tuner.plans == 0  # no base was measured
    tuner.base_took(20.0)
    for _ in range(20):
        tuner.flush_took(0.5)
    expected = best_logged(RunCosts(4.0, MTBF, 20.0, RESTART), LogCosts(0.4, 0.0, 0.5))
    assert tuner.base_steps == pytest.approx(expected[0], rel=0.05)
    assert tuner.flush_steps == pytest.approx(expected[1], rel=0.1)
    plans = tuner.plans
    for _ in range(1000):
        tuner.step_took(4.0)
        tuner.flush_took(0.5)
    assert tuner.plans <= plans + 1  # nothing has moved
    before = tuner.base_steps
    for _ in range(200):
        tuner.step_took(8.0)
    assert tuner.base_steps == pytest.approx(before / 2, rel=0.1)
    for _ in range(10):
        tuner.base_took(80.0)
    assert tuner.base_steps == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_times_without_sense_are_refused(seconds: float) -> None:
    tuner = IntervalTuner(MTBF)
    for note in (tuner.step_took, tuner.base_took, tuner.flush_took):
        with pytest.raises(InvalidArgumentError):
            note(seconds)
    with pytest.raises(InvalidArgumentError):
        IntervalTuner(seconds)
    with pytest.raises(InvalidArgumentError, match="a restart takes 100 s"):
        IntervalTuner(50, 100)
