"""When DeepSpeed's Adam for CPUs computed the powers of its betas anew, which decides their last bits.

Its operator multiplies the powers by the betas at each step that follows the one before; at any other, as after a
checkpoint was loaded, it computes them by `pow`. (DeepSpeed 0.19, `csrc/includes/cpu_adam.h`, IncrementStep.)
"""

from collections.abc import Sequence

import torch

from ckpt_recorder.run import TrackedRun, count_of


def has_beta_powers(optimizer: torch.optim.Optimizer) -> bool:
    """Is it DeepSpeed's Adam for CPUs?"""
    return type(optimizer).__name__ == "DeepSpeedCPUAdam"


class BetaPowers:
    """The step from which the powers of an optimizer's betas are products, followed from step to step."""

    def __init__(self, run: TrackedRun, number: int) -> None:
        """`number`: of the optimizer."""
        self._run, self._number = run, number
        counts = (count_of(run, n) for n, one in enumerate(run.tensors) if one.optimizer == number)
        self._count = -1 if run.was_loaded else max(counts, default=0)
        self._betas = self._betas_now()
        self._since = 0

    def since(self, tensors: Sequence[int]) -> int:
        """At the call of the optimizer that comes next, which steps these tensors."""
        count = 1 + max((count_of(self._run, number) for number in tensors), default=0)
        betas = self._betas_now()
        if betas != self._betas or count not in (self._count, self._count + 1):
            self._since = count
        self._count, self._betas = count, betas
        return self._since

    def _betas_now(self) -> list[object]:
        return [group["betas"] for group in self._run.groups_of(self._number)]
