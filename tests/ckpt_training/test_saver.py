"""Saves of a live job of one process: each is the state at its step, whole or not there, and training goes on."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.chains.verify import verify_chain
from ckpt.pipeline import Execution
from ckpt_formats.core.tensor import read
from ckpt_training import Saver, copies, load
from ckpt_training.copies import HostCopies

SECONDS = 60.0


class Model(nn.Module):
    """With tied weights, buffers, a frozen parameter, a scalar, an empty tensor and a matrix in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.word = nn.Embedding(13, 6)
        self.mix = nn.Conv2d(2, 300, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.word.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(5).to(torch.bfloat16), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.word(tokens))
        scores: torch.Tensor = self.head(x) * self.mix(x.reshape(1, 2, -1, 3)).mean() * self.gain
        return scores


class Run:
    """A run, and what its states were."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [self.model.word.weight], "lr": 3e-3},
                {"params": [*self.model.mix.parameters(), self.model.gain]},
            ],
            1e-2,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.count = 0
        self.truth: dict[int, dict[tuple[str, str], bytes]] = {}

    def step(self) -> float:
        tokens = torch.randint(13, (9,))  # of the generator, whose state is saved
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(tokens), tokens.roll(1))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.count += 1
        self.truth[self.count] = self.state()
        return loss.item()

    def state(self) -> dict[tuple[str, str], bytes]:
        named = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        state = {(name, "model"): one for name, one in named.items()}
        for name, one in self.model.named_parameters():
            state |= {(name, key): value for key, value in self.optimizer.state[one].items() if key != "step"}
        return {key: one.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for key, one in state.items()}

    def saver(self, target: Path, **options: Any) -> Saver:
        options = {"memory": 1 << 18, "stall_seconds": SECONDS, **options}  # slots of 64 KiB
        return Saver(self.model, self.optimizer, target, scheduler=self.scheduler, **options)

    def check(self, checkpoint: ckpt.Checkpoint) -> None:
        """The checkpoint has the state of its step, all of it."""
        step = checkpoint.origin.step
        assert step is not None
        stored = {(p.name, state): read(tensor).tobytes() for p, state, tensor in checkpoint.tensors()}
        assert stored == self.truth[step]


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture(params=["saves", "run.chain"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


class Gate(HostCopies):
    """Copies that begin when the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def copy(self, *arguments: Any) -> None:
        assert self.open.wait(SECONDS)
        super().copy(*arguments)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    result = Gate()
    monkeypatch.setattr(copies, "copies_of", lambda device: result)
    return result


def opened(target: Path, step: int) -> ckpt.Checkpoint:
    return ckpt.open(f"{target}@{step}" if target.suffix == ".chain" else target / f"step-{step:08d}")


def findings(target: Path, step: int) -> list[object]:
    """What is wrong with a save, and in a chain with any."""
    if target.suffix == ".chain":
        return list(verify_chain(target, Execution(workers=1)).findings)
    return list(ckpt.verify(opened(target, step)).findings)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"chain.lock", "chain.json"}


def test_every_save_is_the_state_of_its_step_and_a_run_goes_on_from_it(run: Run, target: Path) -> None:
    """The first save is before the first step, so that the optimizer has no states yet."""
    run.truth[0] = run.state()
    with run.saver(target, in_flight=2, plain={"epoch": 3, "rate": torch.tensor([0.5])}) as saver:
        handles = [saver.save(0)]
        for _ in range(4):
            run.step()
            handles.append(saver.save(run.count))
            assert handles[-1].step == run.count
        results = [handle.wait(SECONDS) for handle in handles]
        assert all(handle.done() for handle in handles)
    assert [result.step for result in results] == [0, 1, 2, 3, 4]
    in_chain = target.suffix == ".chain"
    assert [result.kind for result in results[1:]] == (["delta"] * 4 if in_chain else ["base"] * 4)
    for step, result in enumerate(results):
        checkpoint = opened(target, step)
        run.check(checkpoint)
        assert checkpoint.aliases == {"head.weight": "word.weight"}
        assert Path(result.path).is_dir()
        assert [group.names for group in checkpoint.groups] == [
            ("word.weight",),
            ("mix.weight", "mix.bias", "gain"),
        ]
    assert findings(target, 4) == []
    losses = [run.step() for _ in range(2)]
    other = Run()
    loaded = load(opened(target, 4), other.model, other.optimizer, scheduler=other.scheduler)
    assert loaded.step == 4
    assert loaded.extras["plain"]["epoch"] == 3
    assert [other.step() for _ in range(2)] == losses
    assert len(names_in(target)) == 5
