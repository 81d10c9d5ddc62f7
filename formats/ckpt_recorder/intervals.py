"""When a recorder stores the next base and flushes: fixed intervals, or those that a tuner finds as the run goes on."""

import math
import time
from collections.abc import Callable
from typing import Literal

from ckpt.planning.tuner import IntervalTuner
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_recorder.options import check_interval
from ckpt_training import ranks

_FIRST_REVIEW = 8
"""The number of steps after a base after which the ranks agree on an interval. Then after twice as many, and so on."""
_DEFAULT_FLUSH = 8
"""The steps between flushes until some were measured."""
_LAST_REVIEW = 1024
"""The maximum number of steps between two agreements."""


class RecorderIntervals:
    """The steps between bases, the same on all ranks, and between flushes.

    Attributes:
        base_steps: The steps between bases; 0: no base but the first.
        flush_steps: The steps between flushes.
    """

    def __init__(
        self,
        every: int | Literal["auto"],
        flush: int | Literal["auto"],
        mtbf: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with no figures.

        Args:
            every: The steps between bases, 0 for none, or `"auto"`.
            flush: The steps between flushes, or `"auto"`.
            mtbf: The mean seconds between failures; needed for `"auto"`.
            clock: The time in seconds.

        Raises:
            InvalidArgumentError: An interval makes no sense, or there is no `mtbf` for `"auto"`.
        """
        check_interval("flush", flush, 1)
        self._is_auto = {"base": every == "auto", "flush": flush == "auto"}
        self._tuner: IntervalTuner | None = None
        if any(self._is_auto.values()):
            if mtbf is None or not 0 < mtbf < math.inf:
                absent = "intervals cannot be found without the mean time between failures"
                raise InvalidArgumentError(
                    absent if mtbf is None else f"{mtbf!r} cannot be `mtbf`",
                    where="mtbf",
                    hint="Give the seconds: Recorder(..., mtbf=3 * 3600).",
                )
            self._tuner = IntervalTuner(mtbf)
        self.base_steps = every if isinstance(every, int) else 0
        self.flush_steps = flush if isinstance(flush, int) else _DEFAULT_FLUSH
        self._min_base_steps = 0
        self._clock = clock
        self._last: float | None = None
        """When the last step was recorded."""
        self._stopped = 0.0
        """Seconds that bases took since then."""
        self._waited, self._waited_since_flush, self._unflushed = 0.0, 0.0, 0

    def base_due(self, done: int) -> bool:
        """Is a base due, after so many steps since the last one?"""
        return 0 < self.base_steps <= done

    def base_took(self, seconds: float) -> None:
        """Note how long training stopped for a base."""
        self._stopped += seconds
        self._waited = 0.0  # its writer is a new one
        if self._tuner is not None:
            self._tuner.base_took(seconds)

    def base_copied(self, seconds: float, steps: int) -> None:
        """Note how long training waited for a base that was copied in the background, and its steps until it was done.

        With `"auto"`, the next one begins after four times as many steps, so that a core is not always busy with bases.
        """
        self._min_base_steps = 4 * steps
        if self._tuner is not None:
            self._tuner.base_took(seconds)

    def copy_waited(self, seconds: float) -> None:
        """Note how long a step waited for pieces of a base."""
        self._stopped += seconds

    def step_done(self, done: int, waited: float) -> bool:
        """Note that a step was recorded. All ranks must call it with the same `done`. Has `flush_steps` changed?

        Args:
            done: The number of steps since the last base.
            waited: The seconds for which training has waited for the writer since the last base.
        """
        if self._tuner is None:
            return False
        now, wait = self._clock(), max(waited - self._waited, 0.0)
        if self._last is not None:
            self._tuner.step_took(max(now - self._last - self._stopped - wait, 0.0))
        self._last, self._stopped, self._waited = now, 0.0, waited
        self._waited_since_flush += wait
        self._unflushed += 1
        if self._unflushed >= self.flush_steps:
            self._tuner.flush_took(self._waited_since_flush)
            self._waited_since_flush, self._unflushed = 0.0, 0
        if self._is_auto["base"] and done >= _FIRST_REVIEW and (done & (done - 1) == 0 or done % _LAST_REVIEW == 0):
            steps = max(self._tuner.base_steps, self._min_base_steps) if self._tuner.plans else 0
            self.base_steps = ranks.broadcast(steps)
        before = self.flush_steps
        if self._is_auto["flush"] and self._tuner.plans:
            self.flush_steps = self._tuner.flush_steps
        return self.flush_steps != before
