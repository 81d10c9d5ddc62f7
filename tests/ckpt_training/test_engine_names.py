"""Names of tensors do not depend on what is wrapped around modules, and packages can add engines."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt_formats.core.errors import UnsupportedError
from ckpt_training import load
from ckpt_training.engines.registry import ENTRY_POINTS
from plugin_packages import install


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model of seed 0, in a file of torch."""
    torch.save(model(0).state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_activation_checkpoints_and_compiled_modules_keep_names(saved: Path) -> None:
    run = model(1)
    run[0] = checkpoint_wrapper(run[0])
    run[2] = torch.compile(checkpoint_wrapper(run[2]), backend="eager")
    load(saved, torch.compile(run, backend="eager"))
    assert all(map(torch.equal, run.state_dict().values(), model(0).state_dict().values()))


class Wrapped:
    """A model as an engine has it that ckpt does not know."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner


CODE = """
from ckpt_training.engines.run import plain_run

def run(model, optimizer, rank):
    if type(model).__name__ == "Wrapped":
        return plain_run(model.inner, [])

def fail(model, optimizer, rank):
    raise KeyError("inner")
"""


def test_a_package_can_add_an_engine(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "ours", "ours = our_engine:run", ENTRY_POINTS, our_engine=CODE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    wrapped, plain = Wrapped(model(1)), model(1)
    load(saved, wrapped)
    load(saved, plain)
    for run in (wrapped.inner, plain):
        assert all(map(torch.equal, run.state_dict().values(), model(0).state_dict().values()))


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ("one = our_engine:fail", "the engine 'one' of the package ours fails: KeyError: 'inner'"),
        ("one = our_engine:CODE", "the engine 'one' of the package ours fails: AttributeError"),
        (
            "one = our_engine:run\ntwo = our_engine:run",
            "several engines know this model: 'one' of the package ours",
        ),
    ],
    ids=["raises", "is missing", "two"],
)
def test_a_package_that_fails_is_named(
    entries: str, what: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "ours", entries, ENTRY_POINTS, our_engine=CODE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(UnsupportedError) as raised:
        load(saved, Wrapped(model(1)))
    assert what in raised.value.what
