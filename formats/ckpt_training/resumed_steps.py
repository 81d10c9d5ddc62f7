"""The steps of optimizers that were resumed: some, such as SGD, do not count their own."""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from ckpt_training.engines.run import TrackedRun, count_of

_STEPS: "WeakKeyDictionary[torch.optim.Optimizer, int]" = WeakKeyDictionary()


def count_from(optimizer: Any, step: int) -> None:
    """Count the steps of an optimizer, or of the one in a wrapper, from `step` on."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    if optimizer not in _STEPS:
        optimizer.register_step_post_hook(_count)
    _STEPS[optimizer] = step


def last_step(run: TrackedRun) -> int:
    """The number of the last step of a run, as far as this rank knows. Each call of an optimizer is a step."""
    if run.step is not None:
        return run.step
    if len(run.optimizers) == 1 and run.optimizers[0] in _STEPS:
        return _STEPS[run.optimizers[0]]
    return sum(step_counts(run))


def step_counts(run: TrackedRun) -> list[int]:
    """The number of steps of each optimizer, as far as this rank knows."""
    counts = [0 for _ in run.optimizers]
    for number, one in enumerate(run.tensors):
        counts[one.optimizer] = max(counts[one.optimizer], count_of(run, number))
    return counts


def _count(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None or not bool(found_inf.item()):
        _STEPS[optimizer] += 1
