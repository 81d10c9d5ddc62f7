"""The step at which DeepSpeed's Adam for CPUs last computed the powers of its betas with `pow`.

At consecutive steps its operator multiplies the powers by the betas. At any other step, for example after it loads a
checkpoint, it computes them with `pow`, whose last bits differ. (DeepSpeed 0.19, `csrc/includes/cpu_adam.h`,
IncrementStep.)
"""

from collections.abc import Sequence

import torch

from ckpt_recorder.run import TrackedRun, count_of


def has_beta_powers(optimizer: torch.optim.Optimizer) -> bool:
    """Is it DeepSpeed's Adam for CPUs?"""
    return type(optimizer).__name__ == "DeepSpeedCPUAdam"


class BetaPowers:
    """Tracks the step from which the powers of an optimizer's betas are products."""

    def __init__(self, run: TrackedRun, number: int) -> None:
        """`number`: the index of the optimizer."""
        self._run, self._number = run, number
        counts = (count_of(run, n) for n, one in enumerate(run.tensors) if one.optimizer == number)
        self._count = -1 if run.was_loaded else max(counts, default=0)
        self._betas = self._betas_now()
        self._since = 0

    def since(self, tensors: Sequence[int]) -> int:
        """That step, for the next call of the optimizer, which steps the given tensors."""
        count = 1 + max((count_of(self._run, number) for number in tensors), default=0)
        betas = self._betas_now()
        if betas != self._betas or count not in (self._count, self._count + 1):
            self._since = count
        self._count, self._betas = count, betas
        return self._since

    def _betas_now(self) -> list[object]:
        return [group["betas"] for group in self._run.groups_of(self._number)]
