"""Optimizers that count the steps of a group, as those of Apex do, go on with the stored count."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_formats.core.errors import UnsupportedError
from ckpt_training import load
from ckpt_training.engines.registry import tracked_run
from ckpt_training.engines.run import count_of


class GroupAdam(torch.optim.Optimizer):
    """Adam that counts in groups."""

    __module__ = "apex.optimizers.fused_adam"  # ckpt knows such optimizers by their package

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 0.001)
                first = state["exp_avg"] / (1 - 0.9 ** group["step"])
                second = state["exp_avg_sq"] / (1 - 0.999 ** group["step"])
                parameter -= group["lr"] * first / (second.sqrt() + 1e-8)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def test_counts_of_parameters_become_those_of_groups(tmp_path: Path) -> None:
    saved, model = nn.Linear(3, 3), nn.Linear(3, 3)
    adam, optimizer = torch.optim.Adam(saved.parameters(), 0.1, foreach=False), GroupAdam(model.parameters())
    train(saved, adam, 3)
    save(saved, adam, tmp_path / "run.pt")
    load(tmp_path / "run.pt", model, optimizer)
    assert optimizer.param_groups[0]["step"] == 3
    assert count_of(tracked_run(model, optimizer, 0, is_recorded=False), 0) == 3
    assert {tuple(state) for state in optimizer.state.values()} == {("exp_avg", "exp_avg_sq")}
    train(saved, adam, 1)
    train(model, optimizer, 1)
    torch.testing.assert_close(model.weight, saved.weight)


def test_parameters_of_a_group_with_different_counts_are_refused(tmp_path: Path) -> None:
    saved, model = nn.Linear(3, 3), nn.Linear(3, 3)
    adam = torch.optim.Adam(saved.parameters(), foreach=False)
    train(saved, adam, 1)
    adam.state[saved.bias]["step"] += 1
    save(saved, adam, tmp_path / "run.pt")
    with pytest.raises(UnsupportedError, match="counts the steps of a group, but `bias` had other steps"):
        load(tmp_path / "run.pt", model, GroupAdam(model.parameters()))
