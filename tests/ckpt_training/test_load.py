"""A checkpoint loads straight into a live model and optimizer of one process, and training goes on as it would have."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt_training import load


class Model(nn.Module):
    """With tied weights, a persistent buffer, an unused frozen parameter and a matrix in channels_last."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.word = nn.Embedding(11, 6)
        self.mix = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.word.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.word(tokens))
        image = self.mix(x.reshape(1, 2, -1, 3)).mean()
        logits: torch.Tensor = self.head(x) * image
        return logits


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), 1e-2, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 1e-2),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), 1e-2),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 1e-2),
    "groups": lambda model: torch.optim.RMSprop(
        [{"params": [model.word.weight], "lr": 3e-3}, {"params": [*model.mix.parameters(), *model.norm.parameters()]}],
        1e-2,
        momentum=0.5,
    ),
}


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All values of a run, in an order that does not depend on names."""
    weights = [one.clone() for one in model.state_dict().values()]
    return [weights, copy.deepcopy(optimizer.state_dict())]


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


@pytest.fixture(scope="module", params=OPTIMIZERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any, Any]:
    """An optimizer, a torch file after three steps, the run's values then, and the losses of three more steps."""
    folder, model = tmp_path_factory.mktemp("saved"), Model()
    optimizer = OPTIMIZERS[request.param](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, range(3), scheduler)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(content, folder / "step3.pt")
    return (
        request.param,
        folder / "step3.pt",
        states_of(model, optimizer),
        train(model, optimizer, range(3, 6), scheduler),
    )


@pytest.mark.parametrize("form", ["torch", "universal"])
def test_load_gives_a_fresh_run_all_values_and_its_losses(saved: Any, form: str, tmp_path: Path) -> None:
    name, source, values, losses = saved
    if form == "universal":
        source = tmp_path / "step3"
        ckpt.save(ckpt.open(saved[1]), source, ckpt.Universal(codec="auto"))
    model = Model(seed=1)
    optimizer = OPTIMIZERS[name](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loaded = load(source, model, optimizer, scheduler=scheduler)
    assert_equal(states_of(model, optimizer), values)
    assert train(model, optimizer, range(3, 6), scheduler) == losses
    assert loaded.verified > 0
    assert [notice for notice in loaded.notices if "`frozen`" not in notice] == []
    assert (loaded.missing_keys, loaded.unexpected_keys, dict(loaded.extras)) == ((), (), {})
