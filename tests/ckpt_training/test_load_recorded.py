"""A recorded step loads into a model and an optimizer of the same code, compiled or not, and the run goes on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import open as opened
from ckpt_formats.core.errors import IncompleteError
from ckpt_formats.universal.chain import chain_file, states
from ckpt_recorder import Recorder
from ckpt_training import load
from damage import ckpt


class Counter(nn.Module):
    """Counts its calls in its extra state, as plain values and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + self.calls / 100)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "as tensor": torch.tensor(self.calls)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        assert state["as tensor"].item() == self.calls


class Model(nn.Module):
    """With a lazy module, dropout and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer, self.counter, self.last = nn.Linear(3, 5), Counter(), nn.LazyLinear(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(nn.functional.dropout(self.counter(self.layer(x))))
        return y


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3) * step).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)


def compiled(model: Model) -> nn.Module:
    model.layer = torch.compile(model.layer, backend="eager")  # type: ignore[assignment]
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of five steps in a compiled layer; the file of its third; the losses of all."""
    place, model, losses = tmp_path_factory.mktemp("resumed"), Model(), list[float]()
    model(torch.ones(1, 3))
    model.layer.compile(backend="eager")
    optimizer = sgd(model)
    with Recorder(model, optimizer, place / "run.chain") as recorder:
        for step in range(5):
            losses += train(model, optimizer, range(step, step + 1))
            recorder.note(**{"counter._extra_state": model.counter.get_extra_state()})
    done = ckpt("restore", f"{place}/run.chain@3", place / "step3.pt", "--to", "torch")
    assert done.code == 0, done.err
    return place, losses


@pytest.mark.parametrize("form", ["run.chain@3", "step3.pt"])
@pytest.mark.parametrize("wrap", [lambda model: model, compiled], ids=["plain", "compiled"])
def test_a_loaded_run_has_the_losses_of_the_uninterrupted_one(
    wrap: Any, form: str, recorded: tuple[Path, list[float]]
) -> None:
    place, losses = recorded
    model = wrap(Model())
    optimizer = sgd(model)
    assert load(place / form, model, optimizer).step == 3
    assert train(model, optimizer, range(3, 5)) == losses[3:]


def test_weights_and_extra_states_load_strictly_without_the_recorder(recorded: tuple[Path, list[float]]) -> None:
    place, _ = recorded
    model, content = Model(), torch.load(place / "step3.pt", weights_only=True)
    model.load_state_dict(content["model"], strict=True)
    assert model.counter.calls == 4


def test_a_recorder_goes_on_from_the_resumed_step_of_sgd(recorded: tuple[Path, list[float]]) -> None:
    place, _ = recorded
    model = Model()
    optimizer = sgd(model)
    load(place / "run.chain@3", model, optimizer)
    train(model, optimizer, range(3, 4))
    with Recorder(model, optimizer, place / "later.chain") as recorder:
        assert recorder.step == 4
        train(model, optimizer, range(4, 5))
    chain = place / "later.chain"
    assert states.last_step(chain, chain_file.read(chain)) == 5


def test_load_names_a_missing_extra_state(recorded: tuple[Path, list[float]]) -> None:
    source, model = opened(recorded[0] / "run.chain"), Model()
    source = replace(source, extras={name: one for name, one in source.extras.items() if "extra_state" not in name})
    with pytest.raises(IncompleteError, match=r"missing: `counter\._extra_state`"):
        load(source, model)
    assert load(source, model, strict=False).missing_keys == ("counter._extra_state",)
