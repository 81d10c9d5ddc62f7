"""Lion, as a user would bring it: an optimizer that DeepSpeed does not know, with one state per parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients (Chen et al., 2023)."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            near, far = group["betas"]
            for param in group["params"]:
                if param.grad is not None:
                    self._move(param, group["lr"], group["weight_decay"], near, far)

    def _move(self, param: Tensor, rate: float, decay: float, near: float, far: float) -> None:
        average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        param.mul_(1 - rate * decay).sub_(average.lerp(param.grad, 1 - near).sign(), alpha=rate)
        average.lerp_(param.grad, 1 - far)
