"""Real Megatron core goes on from what we wrote at another layout as it does from its own files."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from held import bits
from megatron_files import loaded
from megatron_jobs.launch import resume
from megatron_resumed import assert_computes_the_same, assert_goes_on_the_same, assert_loaded_is_written, reshard

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama to tp4": ("llama_tp2_pp2", {"tp": 4, "pp": 1}, "--tp 4 --pp 1"),
    "llama to pp4": ("llama_tp2_pp2", {"tp": 1, "pp": 4}, "--tp 1 --pp 4"),
    "llama to vpp2": ("llama_tp2_pp2", {"tp": 1, "vpp": 2}, "--tp 1 --vpp 2"),
    "llama to the plain optimizer": ("llama_tp2_pp2", {"distributed": False}, "--zero 0"),
    "llama to the distributed one": (
        "llama_tp2_plain",
        {"tp": 1, "distributed": True, "dp": 2},
        "--tp 1 --zero 1 --dp 2",
    ),
    "llama, plain, to pp2": ("llama_tp2_plain", {"pp": 2}, "--pp 2"),
    "llama in buckets to tp2 dp2": ("llama_dp2_buckets", {"tp": 2}, "--tp 2"),
    "gpt in buckets, dp3 to dp2": ("gpt_dp3_buckets", {"dp": 2}, "--dp 2"),
    "tied, pp2 to tp2": ("gpt_tied_pp2", {"tp": 2, "pp": 1}, "--tp 2 --pp 1"),
    "tied, tp2 to pp2": ("gpt_tied_tp2", {"tp": 1, "pp": 2}, "--tp 1 --pp 2"),
    "fp32 to pp2": ("gpt_fp32_tp2", {"tp": 1, "pp": 2}, "--tp 1 --pp 2"),
    "fp32 to the distributed one": ("gpt_fp32_tp2", {"tp": 1, "distributed": True, "dp": 2}, "--tp 1 --zero 1 --dp 2"),
    "experts to ep2": ("moe", {"ep": 2, "dp": 2}, "--ep 2"),
    "experts to ep4, plain": ("moe", {"ep": 4, "dp": 4, "distributed": False}, "--ep 4 --zero 0"),
    "experts to tp2": ("moe_ep2", {"ep": 1, "dp": 1, "tp": 2}, "--ep 1 --tp 2 --dp 1"),
    "experts, ep2 to ep2 pp2": ("moe_ep2", {"pp": 2}, "--pp 2"),
    "deepseek to vpp2 ep2": ("deepseek_tp2_pp2", {"tp": 1, "vpp": 2, "ep": 2, "dp": 2}, "--tp 1 --vpp 2 --ep 2 --dp 2"),
}
"""A kind, what is other about the new run, and how to say so."""

OLD = sorted({kind for kind, _, _ in CASES.values()})


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory, megatron_folder: Path) -> Path:
    """What Megatron made of its own files, by kind, and of ours, which are in `written`, by case."""
    out = tmp_path_factory.mktemp("resumed")
    jobs = {kind: {"kind": kind, "changes": {}, "run": str(megatron_folder / kind / "legacy")} for kind in OLD}
    for case, (kind, changes, options) in CASES.items():
        written = out / "written" / case
        written.parent.mkdir(exist_ok=True)
        reshard(megatron_folder / kind / "legacy", written, options)
        jobs[case] = {"kind": kind, "changes": changes, "run": str(written)}
    resume(jobs, out)
    return out


@pytest.mark.parametrize("case", CASES)
def test_model_of_written_legacy_files_computes_the_same(resumed: Path, case: str) -> None:
    assert_computes_the_same(resumed, CASES[case][0], case, CASES[case][1])


@pytest.mark.parametrize("case", CASES)
def test_megatron_loads_the_values_that_were_written(resumed: Path, case: str) -> None:
    assert_loaded_is_written(resumed, case, "megatron-legacy", states)


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_written_legacy_files(resumed: Path, case: str) -> None:
    assert_goes_on_the_same(resumed, CASES[case][0], case, states)


PAIRS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "llama_vpp"): {"pp": 2, "vpp": 2},
    ("llama_vpp", "llama"): {"pp": 1, "vpp": 1},
    ("llama", "llama_dp2_buckets"): {"dp": 2},
    ("llama_dp2_buckets", "llama_vpp"): {"pp": 2, "vpp": 2, "dp": 1},
    ("llama", "llama_plain"): {"zero": 0},
    ("llama_plain", "llama_uneven"): {"pp": 2, "stages": (0, 1), "zero": 1},
    ("gpt", "gpt_dp3_buckets"): {"dp": 3},
    ("gpt_dp3_buckets", "gpt"): {"dp": 1},
    ("gpt_tied", "gpt_tied_pp2"): {"pp": 2},
    ("gpt_tied_pp2", "gpt_tied"): {"pp": 1},
}
"""Runs that differ in nothing but how they are cut and kept."""


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_written_legacy_files_are_those_of_megatron(megatron_folder: Path, tmp_path: Path, pair: Any) -> None:
    source, want = (megatron_folder / kind / "legacy" for kind in pair)
    checkpoint = open_checkpoint(source)
    # How large buckets are is no matter of the layout: the run's arguments say it.
    checkpoint = replace(checkpoint, extras={**checkpoint.extras, "args": open_checkpoint(want).extras["args"]})
    save(checkpoint, tmp_path / "made", writable("megatron-legacy", **PAIRS[pair]), resources=Execution(1, 1 << 20))
    assert_same_files(tmp_path / "made", want)


@pytest.mark.parametrize("name", ["gpt_tied_tp2/dp", "moe_ep2/fully", "llama_uneven/dp", "gpt_fp32_tp2/plain"])
def test_torch_dist_source_becomes_the_legacy_files_that_megatron_wrote(
    megatron_folder: Path, tmp_path: Path, name: str
) -> None:
    kind = name.split("/")[0]
    reshard(megatron_folder / name, tmp_path / "made", "--to megatron-legacy")
    assert_same_files(tmp_path / "made", megatron_folder / kind / "legacy")


def assert_same_files(run: Path, megatrons: Path) -> None:
    actual, expected = loaded(run), loaded(megatrons)
    assert actual.keys() == expected.keys()
    for file, held in expected.items():
        got = actual[file]
        differing = {key for key in held.keys() | got.keys() if held.get(key) != got.get(key)}
        # Each run has random states of its own. PyTorch's Adam lists its states in another order once it has loaded.
        assert all(key.startswith("/rng_state/") or re.fullmatch(r".*/state/\d+/", key) for key in differing), differing


def states(checkpoint: Checkpoint) -> dict[tuple[str, str], object]:
    """Every bit that both optimizers keep: one of them has masters of fp32 weights, too, and steps are elsewhere."""
    by_state: dict[tuple[str, str], object] = {}
    for parameter, state, tensor in checkpoint.tensors():
        if parameter.role == "extra" or state == "step":
            continue
        if state == "master" and parameter.states["model"].dtype == tensor.dtype:
            assert read(tensor).tobytes() == read(parameter.states["model"]).tobytes()
            continue
        by_state[parameter.name, state] = bits(read(tensor))
    for group in checkpoint.groups:
        for name in group.names:
            parameter = checkpoint.parameters[name]
            step = parameter.values["step"] if "step" in parameter.values else read(parameter.states["step"]).item()
            by_state[name, "step"] = int(step)
            by_state[name, "group"] = group.options["wd_mult"], group.options["lr"]
    return by_state
