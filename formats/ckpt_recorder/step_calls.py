"""The calls of optimizers that make up a step of the run."""

from dataclasses import dataclass
from types import FrameType
from typing import Any

from ckpt_recorder.proof import StepProof


@dataclass
class OptimizerCall:
    """The last call of one optimizer, and the one that runs now."""

    count: int = 0
    """The number of calls, with this one."""
    flags: list[Any] | None = None
    """The options of all groups but their numbers, at the last call."""
    proof_is_due: bool = False
    proof: StepProof | None = None
    has_closure: bool = False
    frame: FrameType | None = None
    """The frame that calls the hooks of the outermost `step`."""
    is_open: bool = False
    """Was what it is given recorded, and not yet what it did?"""
    is_repeated: bool = False
    """Was its closure called again?"""
    is_skipped: bool = False

    def end(self) -> None:
        """It has ended, or was interrupted."""
        self.is_open = self.is_repeated = self.has_closure = False
        self.proof = self.frame = None


class StepCalls:
    """Where the run is among the calls of a step.

    Attributes:
        of: The calls by optimizer.
        has_two_parts: Has the log two records of the current call, because a proof follows it?
    """

    def __init__(self, optimizers: int, per_step: int) -> None:
        """`per_step`: the number of calls in each step of the run."""
        self.of = [OptimizerCall() for _ in range(optimizers)]
        self.has_two_parts = False
        self._per_step = per_step
        self._done = 0

    @property
    def are_complete(self) -> bool:
        """Is the run between two steps?"""
        return self._done == 0

    @property
    def is_last(self) -> bool:
        """Does the step end with the current call?"""
        return self._done == self._per_step - 1

    @property
    def are_open(self) -> bool:
        """Does a call run now?"""
        return any(call.is_open for call in self.of)

    @property
    def are_proved(self) -> bool:
        """Was a proof due at the last call of an optimizer?"""
        return any(call.proof_is_due for call in self.of)

    def part(self, half: int) -> tuple[int, int]:
        """The number of a record of the current call among those of its step, and how many these are."""
        if self.has_two_parts:
            return 2 * self._done + half, 2 * self._per_step
        return self._done, self._per_step

    def end_one(self) -> bool:
        """Count a call that is recorded. Returns whether the step is complete with it."""
        self._done = (self._done + 1) % self._per_step
        return self.are_complete
