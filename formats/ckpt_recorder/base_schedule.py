"""When bases are copied in the background: at the same steps on all ranks, as soon as the process of each is ready."""

import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckpt_recorder.background_bases import BackgroundBases
from ckpt_recorder.intervals import RecorderIntervals
from ckpt_recorder.options import Bases, RecorderWarning
from ckpt_training import ranks


class BaseSchedule:
    """Starts the process that makes bases, begins them when they are due, and ends the process.

    Attributes:
        process: The process that makes bases; None before the first step, and if it has failed.
        spread: The number of steps over which a base is copied.
    """

    def __init__(
        self,
        chain: Path,
        bases: Bases,
        intervals: RecorderIntervals,
        start: Callable[[], BackgroundBases | None],
    ) -> None:
        """`start`: starts the process that makes bases; None if the recording is broken."""
        self.spread = bases.spread if bases.every == "auto" else min(bases.spread, bases.every)
        self.process: BackgroundBases | None = None
        self._chain, self._intervals, self._start = chain, intervals, start
        self._unclosed: weakref.finalize[Any, Any] | None = None
        """Ends the process if the recorder is collected before it is closed."""
        self._from = 0
        """The step from which the interval to the next base counts."""
        self._making_since: int | None = None
        """The step after which this rank began a base that is not done."""
        self._steps_left = 0
        """The number of steps after which pieces of a base are still copied, the same on all ranks."""

    def restart(self, step: int) -> None:
        """A segment begins, whose first state is a base."""
        self._from, self._steps_left = step, 0

    def steps_since(self, step: int) -> int:
        """The number of steps since the last base began."""
        return step - self._from

    def wait(self, tensors: frozenset[int]) -> None:
        """Wait for the pieces of these tensors, which the next update changes."""
        if self.process is not None and self.process.is_copying:
            self._intervals.copy_waited(self.process.wait(tensors))

    @torch.no_grad()
    def step_done(self, step: int) -> None:
        """Begin a base if one is due, and copy the pieces of this step. All ranks do so at the same steps."""
        if self.process is None:
            self.process = self._start()
            if self.process is not None:
                self._unclosed = weakref.finalize(self, self.process.close, wait=False)
                self._unclosed.atexit = False
        if self.process is not None:
            self._warn(self.process)
            if self._making_since is not None and self.process.is_ready:
                self._intervals.base_copied(self.process.waited, step - self._making_since)
                self._making_since = None
        if not self._steps_left and self._intervals.base_due(step - self._from):
            self._begin(step)
        if self._steps_left:
            self._steps_left -= 1
            if self.process is not None:
                self.process.copy_next(step)

    def drop(self) -> None:
        """End the process. A base that is not complete is given up."""
        process = self._take()
        if process is not None:
            process.drop()
            process.close(wait=False)
        self._making_since = None

    def close(self) -> None:
        """Wait for the base that was begun, and end the process."""
        process = self._take()
        if process is not None:
            process.close(wait=True)
            self._warn(process)

    def forget(self) -> None:
        """Leave the process alone: another process of the run owns it."""
        self._take()

    def _begin(self, step: int) -> None:
        """Begin a base if the process of each rank is ready for it; if not, a little later."""
        process = self.process
        has_room = process is not None and process.has_room()
        if not all(ranks.gather(process is not None and has_room and process.is_ready)):
            self._from += max(1, self._intervals.base_steps // 16)
            if process is not None and (process.has_failed or not has_room):
                self.drop()  # another one starts after the next step
            return
        assert process is not None
        self._from = self._making_since = step
        self._steps_left = self.spread
        process.begin(step)

    def _warn(self, process: BackgroundBases) -> None:
        """Warn of bases that were not stored. Training and the log go on."""
        while process.problems:
            warnings.warn(f"{self._chain}: {process.problems.popleft()}", RecorderWarning, stacklevel=5)

    def _take(self) -> BackgroundBases | None:
        """The process, which is no longer this object's."""
        if self._unclosed is not None:
            self._unclosed.detach()
            self._unclosed = None
        process, self.process = self.process, None
        return process
