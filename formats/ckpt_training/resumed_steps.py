"""The steps of optimizers that were resumed: some, such as SGD, do not count their own."""

from typing import Any
from weakref import WeakKeyDictionary

import torch

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


def resumed_step(*optimizers: torch.optim.Optimizer) -> int | None:
    """The step of the only optimizer of a run, if it was resumed."""
    return _STEPS.get(optimizers[0]) if len(optimizers) == 1 else None


def _count(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None or not bool(found_inf.item()):
        _STEPS[optimizer] += 1
