"""Intervals that follow what a run measures while it goes on, as LowDiff's tuner does (SC '25, arXiv 2509.04084).

The tuner asks `search` again when a measured figure has moved, so its intervals are those that `ckpt plan` would give
for the figures of the moment.
"""

import math
from dataclasses import dataclass

from ckpt.planning.costs import LogCosts, RunCosts
from ckpt.planning.search import best_logged
from ckpt_formats.core.errors import InvalidArgumentError

_MOVED = 0.05
"""The relative change of a figure after which the intervals are computed again."""
_STEP_WEIGHT = 0.02
"""The weight of the newest step in the mean of steps: the mean follows a change within about a hundred steps."""
_STALL_WEIGHT = 0.5
"""The weight of the newest stall: there are few, and the disk of today says little about that of tomorrow."""


@dataclass(frozen=True)
class TunerFigures:
    """The measured figures of a moment, in seconds."""

    step: float
    base_stall: float
    flush_stall: float

    def moved(self, other: "TunerFigures") -> bool:
        """Is one of them another than it was, by more than 5 %? Stalls below a thousandth of a step are equal."""
        least = self.step / 1000
        pairs = ((self.step, other.step), (self.base_stall, other.base_stall), (self.flush_stall, other.flush_stall))
        return any(abs(a - b) > _MOVED * max(a, b, least) for a, b in pairs)


class IntervalTuner:
    """The steps between bases and between flushes, from what is measured.

    Attributes:
        base_steps: The steps between bases; 1 until a step and a base were measured.
        flush_steps: The steps between flushes of the log.
        plans: How often the intervals were computed.
    """

    def __init__(self, mtbf: float, restart: float = 0.0, replay_share: float = 0.1) -> None:
        """State what the run cannot measure.

        Args:
            mtbf: The mean seconds between failures of the whole job.
            restart: The seconds from a failure to the first new step, without replay.
            replay_share: The time to replay a step, as a share of the time to compute it.

        Raises:
            InvalidArgumentError: A figure makes no sense.
        """
        RunCosts(1.0, mtbf, 0.0, restart)
        LogCosts(replay_share)
        self._mtbf, self._restart, self._replay_share = mtbf, restart, replay_share
        self._step: float | None = None
        self._base: float | None = None
        self._flush = 0.0
        self._planned: TunerFigures | None = None
        self.base_steps, self.flush_steps, self.plans = 1, 1, 0

    def step_took(self, seconds: float) -> None:
        """Note the time of a step, with recording and without the stalls of bases and flushes."""
        self._step = _mean(self._step, _checked(seconds), _STEP_WEIGHT)
        self._plan()

    def base_took(self, seconds: float) -> None:
        """Note how long training stopped for a base."""
        self._base = _mean(self._base, _checked(seconds), _STALL_WEIGHT)
        self._plan()

    def flush_took(self, seconds: float) -> None:
        """Note how long training stopped for a flush; 0 if it did not."""
        self._flush = _mean(self._flush, _checked(seconds), _STALL_WEIGHT)
        self._plan()

    def _plan(self) -> None:
        """Compute the intervals again if a figure has moved."""
        if not self._step or self._base is None:
            return
        now = TunerFigures(self._step, self._base, self._flush)
        if self._planned is not None and not now.moved(self._planned):
            return
        run = RunCosts(now.step, self._mtbf, now.base_stall, self._restart)
        log = LogCosts(now.step * self._replay_share, 0.0, now.flush_stall)
        self.base_steps, self.flush_steps = best_logged(run, log)
        self._planned = now
        self.plans += 1


def _mean(before: float | None, value: float, weight: float) -> float:
    return value if before is None else before + weight * (value - before)


def _checked(seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InvalidArgumentError(f"{seconds!r} is not a measured time", where="seconds")
    return seconds
