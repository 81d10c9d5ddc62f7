"""What happens around a recording: working directories, second recorders, forks, removed folders."""

import os
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain import states
from ckpt_recorder import Recorder, callbacks


class Run:
    """A model of two weights, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = nn.Linear(2, 1, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1, fused=True)

    def recorder(self, chain: str | Path, **options: Any) -> Recorder:
        return Recorder(self.model, self.optimizer, chain, random_states=False, **options)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(3, 2)).sum().backward()
            self.optimizer.step()


def last_step(chain: Path) -> int:
    return states.last_step(chain, index.read(chain))


def test_a_relative_chain_stays_where_it_began_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = Run()
    with run.recorder("run.chain", base=2):
        os.chdir("elsewhere")
        run.step(3)
    assert last_step(tmp_path / "run.chain") == 3
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("huggingface_callback", lambda one: one.HuggingFaceCallback("run.chain").on_train_begin),
        ("lightning_callback", lambda one: one.LightningCallback("run.chain").on_train_start),
    ],
    ids=["Hugging Face", "Lightning"],
)
def test_callbacks_record_into_the_chain_of_their_own_working_directory(
    name: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, chains = without_trainer(name, monkeypatch), list[Any]()
    monkeypatch.setattr(module, "Recorder", lambda model, optimizer, chain, **options: chains.append(chain))
    monkeypatch.chdir(tmp_path)
    on_start = start(module)
    monkeypatch.chdir("/")
    state = SimpleNamespace(global_step=0, optimizers=[])
    on_start(*([state, None] if name == "lightning_callback" else [None, state, None]))
    assert chains == [tmp_path / "run.chain"]


def without_trainer(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of a module of callbacks, as if its trainer were not installed: to import one takes seconds."""
    monkeypatch.setattr(callbacks, "installed_class", lambda *paths: object)
    spec = find_spec(f"ckpt_recorder.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
