"""Every kind of checkpoint that real DeepSpeed writes, against what its own memory held when it wrote them."""

from pathlib import Path

import pytest
import torch

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Resources
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import open_checkpoint, writable
from engines.kinds import EVERY_KIND, KINDS
from torch_values import same

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, zoo: Path) -> Path:
    folder: Path = zoo / request.param
    return folder


@pytest.fixture(scope="module")
def truth(kind: Path) -> dict:
    return torch.load(kind / "truth.pt", weights_only=False)


def assert_is_the_truth(found: Checkpoint, truth: dict) -> None:
    for name, states in truth["params"].items():
        parameter = found.parameters[name]
        assert parameter.role == "parameter", name
        for state, expected in states.items():
            assert same(parameter.states[MODEL if state == "lp" else state], expected), f"{name}/{state}"
        raw = {step for group in truth["raw_step"] for step in group}
        if raw:
            kept = parameter.states.get("step")
            step = parameter.values.get("step") if kept is None else read(kept).item()
            # Fused Adam leaves all but one count of a stage 0 group at zero; the one that counts is the largest.
            assert step is None or step == max(max(raw), truth["step"]) or step in raw - {0}, name
    for part, role in (("frozen", "frozen"), ("buffers", "buffer")):
        for name, expected in truth[part].items():
            assert found.parameters[name].role == role, name
            assert same(found.parameters[name].states[MODEL], expected), name
    known = {*truth["params"], *truth["frozen"], *truth["buffers"]}
    assert {name for name, p in found.parameters.items() if p.role != "extra"} == known
    assert dict(found.aliases) == {
        alias: name for alias, name in truth.get("tied", {}).items() if alias in found.aliases
    }
    assert [list(group.names) for group in found.groups] == [group["names"] for group in truth["param_groups"]]


def test_no_kind_is_left_out():
    if left_out := [kind.name for kind in EVERY_KIND if kind.name not in KINDS]:
        pytest.skip(f"no C++ compiler builds the operators of DeepSpeed that these need: {' '.join(left_out)}")


def test_what_we_read_is_what_the_engine_held(kind, truth):
    assert_is_the_truth(open_checkpoint(kind / "ckpt"), truth)


def test_groups_keep_their_options(kind, truth):
    for group, expected in zip(open_checkpoint(kind / "ckpt").groups, truth["param_groups"], strict=True):
        if not group.options:  # elastic checkpoints do not hold them
            assert "elastic" in kind.name
        for key, value in group.options.items():
            if key in expected and not isinstance(expected[key], torch.Tensor):
                assert value == expected[key] or tuple(value) == tuple(expected[key]), key


def test_universal_holds_the_same_and_verifies(kind, truth, tmp_path):
    save(open_checkpoint(kind / "ckpt"), tmp_path / "u", writable("universal"), Resources())
    found = open_checkpoint(tmp_path / "u")
    assert_is_the_truth(found, truth)
    assert find_problems(found, Resources()) == []
    assert find_problems(open_checkpoint(kind / "ckpt"), Resources()) == []
    for name in truth["params"]:  # copies are not stored twice
        states = found.parameters[name].states
        assert [raw.path for raw in states[MODEL].sources()] == [raw.path for raw in states[MASTER].sources()]


def test_torch_loads_what_we_write_without_running_code(kind, truth, tmp_path):
    save(open_checkpoint(kind / "ckpt"), tmp_path / "m.pt", writable("torch"), Resources())
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    for name, states in truth["params"].items():
        assert torch.equal(loaded["model"][name], states["lp"]), name
        for state in states.keys() - {"lp"}:
            assert torch.equal(loaded["optimizer"]["state"][name][state], states[state]), f"{name}/{state}"
    for name, expected in (truth["frozen"] | truth["buffers"]).items():
        assert torch.equal(loaded["model"][name], expected), name
    assert [g["params"] for g in loaded["optimizer"]["param_groups"]] == [g["names"] for g in truth["param_groups"]]
    assert loaded["extras"]["global_steps"] == truth.get("global_steps", loaded["extras"]["global_steps"])
