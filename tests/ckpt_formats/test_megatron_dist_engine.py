"""Real Megatron core goes on from the distributed checkpoints that we wrote, and has written the same itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.tensor import read
from ckpt_formats.engines.dcp.metadata import read_metadata
from held import bits
from megatron_jobs.kinds import KINDS
from megatron_jobs.launch import resume
from megatron_resumed import assert_computes_the_same, assert_goes_on_the_same, assert_loaded_is_written, reshard
from megatron_trained import Change, assert_trains_the_same, train

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "llama to tp4": ("llama_tp2_pp2", "fully", {"tp": 4, "pp": 1}, "--tp 4 --pp 1"),
    "llama to pp4": ("llama_tp2_pp2", "dp", {"tp": 1, "pp": 4}, "--tp 1 --pp 4"),
    "llama to vpp2": ("llama_tp2_pp2", "legacy", {"tp": 1, "vpp": 2}, "--tp 1 --vpp 2 --to megatron"),
    "tied, pp2 to tp2": ("gpt_tied_pp2", "legacy", {"tp": 2, "pp": 1}, "--tp 2 --pp 1 --to megatron"),
    "tied, fp32 to pp2": ("gpt_fp32_tp2", "plain", {"tp": 1, "pp": 2}, "--tp 1 --pp 2"),
    "experts to ep2": ("moe", "dp", {"ep": 2, "dp": 2}, "--ep 2"),
    "experts to ep2, plain": ("moe", "zero", {"ep": 2, "dp": 2, "distributed": False}, "--ep 2 --zero 0"),
    "plain to distributed": ("llama_tp2_plain", "plain", {"pp": 2, "distributed": True}, "--pp 2 --zero 1"),
    "wrapped to one rank": ("llama_uneven", "fully", {"pp": 1, "more": {}}, "--pp 1"),
    "deepseek to tp2": (
        "deepseek_vpp_ep2",
        "dp",
        {"tp": 2, "pp": 1, "vpp": None, "ep": 1, "dp": 1},
        "--tp 2 --pp 1 --ep 1 --dp 1",
    ),
}
"""A kind, how it is saved, what is other about the new run, and how to say so."""
OLD = sorted({kind for kind, *_ in CASES.values()})


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory, megatron_folder: Path) -> Path:
    """What Megatron made of its own files, by kind, and of ours, which are in `written`, by case."""
    out = tmp_path_factory.mktemp("resumed_dist")
    own = {kind: "dp" if KINDS[kind].distributed else "plain" for kind in OLD}
    jobs = {kind: {"kind": kind, "changes": {}, "run": str(megatron_folder / kind / own[kind])} for kind in OLD}
    for case, (kind, container, changes, options) in CASES.items():
        written = out / "written" / case
        written.parent.mkdir(exist_ok=True)
        reshard(megatron_folder / kind / container, written, options)
        jobs[case] = {"kind": kind, "changes": changes, "run": str(written)}
    resume(jobs, out, "resume_dist.py")
    return out


@pytest.mark.parametrize("case", CASES)
def test_model_of_written_megatron_computes_the_same(resumed: Path, case: str) -> None:
    assert_computes_the_same(resumed, CASES[case][0], case, CASES[case][2])


@pytest.mark.parametrize("case", CASES)
def test_megatron_loads_the_values_that_were_written(resumed: Path, case: str) -> None:
    assert_loaded_is_written(resumed, case, "megatron", states)


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_written_megatron(resumed: Path, case: str) -> None:
    assert_goes_on_the_same(resumed, CASES[case][0], case, states)


CHANGES = {
    "tp2 ep2 to pp2 ep2": Change("deepseek_tp2_ep2", pp=2, ep=2, dp=2),
    "tp2 ep2 to pp2": Change("deepseek_tp2_ep2", pp=2),
}
"""The campaign `megatron_training` has more."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, megatron_folder: Path) -> Path:
    out = tmp_path_factory.mktemp("trained")
    train(CHANGES, megatron_folder, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_losses_of_a_resharded_run_are_those_of_megatrons_own_load(trained: Path, change: str) -> None:
    """Latent attention, shared experts, a balance bias and a layer for multi-token prediction, with the optimizer."""
    assert_trains_the_same(CHANGES[change], change, trained)


def states(checkpoint: Checkpoint) -> dict[tuple[str, str], object]:
    """Every bit that both optimizers keep: one of them has masters of fp32 weights, too, and steps are elsewhere."""
    by_state: dict[tuple[str, str], object] = {}
    for parameter, state, tensor in checkpoint.tensors():
        low = parameter.weight.dtype.name != "float32"
        if parameter.role != "extra" and state != "step" and (state != "master" or low):
            by_state[parameter.name, state] = bits(read(tensor))
    for group in checkpoint.groups:
        for name in group.names:
            parameter = checkpoint.parameters[name]
            step = parameter.values["step"] if "step" in parameter.values else read(parameter.states["step"]).item()
            by_state[name, "step"] = int(step)
            by_state[name, "group"] = group.options["wd_mult"], group.options["lr"]
    return by_state


PAIRS: dict[tuple[str, str], str] = {
    ("llama_tp2_pp2/dp", "llama_tp2_pp2/fully"): "",
    ("llama_tp2_pp2/fully", "llama/fully"): "--tp 1 --pp 1",
    ("llama/zero", "llama_vpp/fully"): "--pp 2 --vpp 2",
    ("llama_vpp/legacy", "llama/fully"): "--pp 1 --to megatron",
    ("llama/dp", "llama_uneven/fully"): "--pp 2 --stages 0,1",
    ("llama_plain/plain", "llama/fully"): "--zero 1",
    ("llama_tp2_plain/legacy", "llama_tp2_plain/plain"): "--to megatron",
    ("gpt_fp32_tp2/plain", "gpt_fp32_tp2/plain"): "",
    ("gpt_tied_pp2/legacy", "gpt_tied/fully"): "--pp 1 --to megatron",
    ("gpt_tied/dp", "gpt_tied_tp2/fully"): "--tp 2",
    ("moe/legacy", "moe_ep2/fully"): "--ep 2 --to megatron",
    ("moe_ep2/dp", "moe/fully"): "--ep 1 --dp 1",
    ("deepseek_vpp_ep2/legacy", "deepseek_tp2_pp2/fully"): "--vpp 1 --tp 2 --ep 1 --dp 1 --to megatron",
    ("deepseek_tp2_pp2/dp", "deepseek/fully"): "--tp 1 --pp 1",
}
"""Runs that differ in how they are cut and saved, and perhaps in their values."""


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_written_megatron_has_the_keys_and_blocks_of_megatron(megatron_folder: Path, tmp_path: Path, pair: Any) -> None:
    reshard(megatron_folder / pair[0], tmp_path / "made", PAIRS[pair])
    assert listed(tmp_path / "made") == listed(megatron_folder / pair[1])


def listed(run: Path) -> dict[str, Any]:
    """What `.metadata` and `common.pt` say, without what wraps the model."""
    import torch

    folder = next(run.glob("iter_*"))
    metadata = read_metadata(folder / ".metadata")
    keys = {
        key: (t.dtype.name, t.shape, sorted(str(box) for box, _ in t.blocks)) for key, t in metadata.tensors.items()
    }
    keys |= dict.fromkeys(metadata.objects)
    common = torch.load(folder / "common.pt", weights_only=False)
    plain = {key.replace("module.", ""): one for key, one in keys.items()}
    return {"keys": plain, **common, "args": vars(common["args"])}
