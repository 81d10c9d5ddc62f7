"""Every kind of checkpoint that real DeepSpeed writes, against what its own memory held when it wrote them."""

from pathlib import Path

import pytest
import torch

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from deepspeed_truth import assert_is_the_truth
from engines.kinds import EVERY_KIND, KINDS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, zoo: Path) -> Path:
    folder: Path = zoo / request.param
    return folder


@pytest.fixture(scope="module")
def truth(kind: Path) -> dict:
    return torch.load(kind / "truth.pt", weights_only=False)


@pytest.fixture(scope="module")
def checkpoint(kind: Path) -> Checkpoint:
    """Opened once for all tests of a kind."""
    return open_checkpoint(kind / "ckpt")


def test_zoo_has_every_kind():
    if left_out := [kind.name for kind in EVERY_KIND if kind.name not in KINDS]:
        pytest.skip(f"no C++ compiler builds the operators of DeepSpeed that these need: {' '.join(left_out)}")


def test_deepspeed_reads_the_values_of_the_engine(checkpoint, truth):
    assert_is_the_truth(checkpoint, truth)


def test_deepspeed_reads_the_options_of_groups(kind, checkpoint, truth):
    for group, expected in zip(checkpoint.groups, truth["param_groups"], strict=True):
        if not group.options:  # elastic checkpoints do not hold them
            assert "elastic" in kind.name
        for key, value in group.options.items():
            if key in expected and not isinstance(expected[key], torch.Tensor):
                assert value == expected[key] or tuple(value) == tuple(expected[key]), key


def test_universal_holds_what_deepspeed_holds_and_verifies(checkpoint, truth, tmp_path):
    save(checkpoint, tmp_path / "u", writable("universal"))
    written = open_checkpoint(tmp_path / "u")
    assert_is_the_truth(written, truth)
    assert find_problems(written, Execution()) == []
    assert find_problems(checkpoint, Execution()) == []
    for name in truth["params"]:  # copies are not stored twice
        states = written.parameters[name].states
        assert [raw.path for raw in states[MODEL].sources()] == [raw.path for raw in states[MASTER].sources()]


def test_torch_loads_written_files_with_weights_only(checkpoint, truth, tmp_path):
    save(checkpoint, tmp_path / "m.pt", writable("torch"))
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    for name, states in truth["params"].items():
        assert torch.equal(loaded["model"][name], states["lp"]), name
        for state in states.keys() - {"lp"}:
            assert torch.equal(loaded["optimizer"]["state"][name][state], states[state]), f"{name}/{state}"
    for name, expected in (truth["frozen"] | truth["buffers"]).items():
        assert torch.equal(loaded["model"][name], expected), name
    assert [g["params"] for g in loaded["optimizer"]["param_groups"]] == [g["names"] for g in truth["param_groups"]]
    assert loaded["extras"]["global_steps"] == truth.get("global_steps", loaded["extras"]["global_steps"])
