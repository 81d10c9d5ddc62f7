"""Models of Megatron core that became transformers', and the other way: both compute the same."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckpt_cli.main import cli
from engines.launch import run_script
from hf_jobs.models import MODELS
from megatron_jobs.families import EXPECTED, FAMILIES
from trained import once

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

JOBS = Path(__file__).parents[1] / "jobs"
INPUT = (torch.arange(24) * 7 % 64).reshape(2, 12)
CLOSE = 1e-5
"""Logits are about 1, and other choices of any family change them by 1e-3 or more: see the last test."""


def convert(source: Path, target: Path, *options: str) -> str:
    done = CliRunner().invoke(cli, ["convert", str(source), str(target), *options])
    assert done.exit_code == 0, done.stderr
    return done.stderr


def computed(jobs: Mapping[str, Mapping[str, Any]], script: str, out: Path) -> None:
    (out / "jobs.json").write_text(json.dumps(list(jobs.values()), default=str))
    arguments = [str(out / "jobs.json")]
    run_script(JOBS / script, ["load", *arguments] if script.startswith("megatron") else arguments, 3)


def by_transformers(folders: Mapping[str, Path], out: Path) -> dict[str, dict[str, Any]]:
    """What transformers computes of folders, and what it says of their tensors."""
    torch.save(INPUT, out / "input.pt")
    jobs = {
        name: {
            "folder": folder,
            "input": out / "input.pt",
            "logits": out / f"{name}.pt",
            "report": out / f"{name}.json",
        }
        for name, folder in folders.items()
    }
    computed(jobs, "hf_jobs/logits.py", out)
    return {
        name: json.loads((out / f"{name}.json").read_text()) | {"logits": torch.load(out / f"{name}.pt")}
        for name in folders
    }


@pytest.fixture(scope="module")
def megatron() -> Path:
    """Checkpoints of Megatron core, and what it computes: see `megatron_jobs/logits.py`."""
    script = JOBS / "megatron_jobs" / "logits.py"
    return once("megatron_jobs", "families", lambda out: run_script(script, ["save", str(out)], 3))


@pytest.fixture(scope="module")
def loaded(megatron: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("hf")
    for name in FAMILIES:
        convert(megatron / name, out / name, "--to", "hf")
    return by_transformers({name: out / name for name in FAMILIES}, out)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_what_megatron_does(name: str, megatron: Path, loaded: dict[str, dict[str, Any]]) -> None:
    report = loaded[name]
    assert (report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"]) == ([], [], [])
    assert report["model_type"] == EXPECTED.get(name, name)
    expected = torch.load(megatron / f"{name}.logits.pt")
    assert report["logits"].shape == expected.shape == (2, 12, 91)
    assert (report["logits"] - expected).abs().max() < CLOSE


@pytest.fixture(scope="module")
def back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers, what it computes of them, and what Megatron core does of our translation."""
    out = tmp_path_factory.mktemp("back")
    run_script(JOBS / "hf_jobs" / "save_models.py", [str(out)], 2)
    jobs = {}
    for name in MODELS:
        convert(out / name, out / f"{name}.megatron", "--to", "megatron-legacy")
        (weights,) = (out / f"{name}.megatron").rglob("model_optim_rng.pt")
        jobs[name] = {"weights": weights, "logits": out / f"{name}.logits.pt"}
    computed(jobs, "megatron_jobs/logits.py", out)
    by_transformers({name: out / name for name in MODELS}, out)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_megatron_computes_what_transformers_does(name: str, back: Path) -> None:
    ours, theirs = torch.load(back / f"{name}.logits.pt"), torch.load(back / f"{name}.pt")
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < CLOSE


CHOICES = {
    "llama_wide_heads": {"rope_theta": 10000.0},
    "llama_tied_linear": {"rope_scaling": None},
    "llama3": {"rope_scaling": None},
    "mistral": {"sliding_window": 4},
    "qwen2": {"rms_norm_eps": 1e-3},
    "mixtral": {"num_experts_per_tok": 1},
    "gpt2": {"activation_function": "gelu_new"},
}


def test_any_other_choice_of_the_configuration_would_show(
    megatron: Path, loaded: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for name, changes in CHOICES.items():
        convert(megatron / name, tmp_path / name, "--to", "hf")
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    others = by_transformers({name: tmp_path / name for name in CHOICES}, tmp_path)
    for name, other in others.items():
        assert (other["logits"] - loaded[name]["logits"]).abs().max() > 4 * CLOSE, name
