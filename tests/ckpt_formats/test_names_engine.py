"""Models of Megatron core that became transformers', and the other way: both compute the same."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file

from ckpt_cli.main import cli
from ckpt_formats.core.geometry import Shape
from ckpt_formats.names.config import ConfiguredModel, configured_model
from ckpt_formats.names.packings import stored_shape
from engines.launch import run_script
from hf_jobs.models import MODELS
from hf_jobs.random_models import NOT_IN_MEGATRON, names
from megatron_jobs.families import EXPECTED, FAMILIES, INPUT
from trained import once

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

JOBS = Path(__file__).parents[1] / "jobs"
CLOSE = 1e-5
"""Logits are about 1 to 5, and other choices of any family change them by 1e-3 or more: see the last test."""
WITH_EXPERTS = ("qwen2_moe-1", "qwen3_moe-1", "glm4_moe-1", "gpt_oss-2")
RANDOM_MODELS = [*(name for name in names(1) if not name.startswith(NOT_IN_MEGATRON)), *WITH_EXPERTS]
NOT_TRANSLATED = [f"{family}-0" for family in NOT_IN_MEGATRON]
SPLIT = {
    "llama-1-even": "--tp 2 --pp 2",
    "mixtral-0-even": "--ep 2 --etp 1",
    "qwen2_moe-1-even": "--tp 2 --ep 2 --etp 2",
    "qwen3_moe-1-even": "--pp 2",
    "glm4_moe-1-even": "--tp 2 --ep 2 --etp 1",
    "gpt_oss-2-even": "--tp 2 --pp 2 --ep 2 --etp 1",
}
"""Models of even sizes, and the ranks over which they are resharded."""
CHOICES = {
    "llama_wide_heads": {"rope_theta": 10000.0},
    "llama_tied_linear": {"rope_scaling": None},
    "llama3": {"rope_scaling": None},
    "mistral": {"sliding_window": 4},
    "qwen2": {"rms_norm_eps": 1e-3},
    "mixtral": {"num_experts_per_tok": 1},
    "gpt2": {"activation_function": "gelu_new"},
}
"""Entries of config.json, each of which changes what a model of `FAMILIES` computes."""


def convert(source: Path, target: Path, *options: str) -> str:
    done = CliRunner().invoke(cli, ["convert", str(source), str(target), *options])
    assert done.exit_code == 0, done.stderr
    return done.stderr


def by_transformers(folders: Mapping[str, Path], out: Path) -> dict[str, dict[str, Any]]:
    """What transformers computes of folders, and what it says of their tensors."""
    torch.save(torch.tensor(INPUT), out / "input.pt")
    jobs = [
        {
            "folder": folder,
            "input": out / "input.pt",
            "logits": out / f"{name}.pt",
            "report": out / f"{name}.json",
        }
        for name, folder in folders.items()
    ]
    (out / "jobs.json").write_text(json.dumps(jobs, default=str))
    run_script(JOBS / "hf_jobs" / "logits.py", [str(out / "jobs.json")], len(jobs))
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
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers, what it computes of them, and what Megatron core does of our translation.

    NAME.back is that translation translated back by Megatron's arguments alone.
    """
    out = tmp_path_factory.mktemp("there")
    known = [*MODELS, *RANDOM_MODELS, *SPLIT]
    run_script(JOBS / "hf_jobs" / "save_models.py", [str(out), *known, *NOT_TRANSLATED], 2)
    jobs = []
    for name in known:
        convert(out / name, out / f"{name}.megatron", "--to", "megatron-legacy")
        (weights,) = (out / f"{name}.megatron").rglob("model_optim_rng.pt")
        root = torch.load(weights, weights_only=False)
        torch.save({key: value for key, value in root.items() if not key.startswith("hf/")}, weights)
        convert(out / f"{name}.megatron", out / f"{name}.back", "--to", "hf")
        jobs.append({"weights": str(weights), "logits": str(out / f"{name}.megatron.pt")})
    (out / "jobs.json").write_text(json.dumps(jobs))
    run_script(JOBS / "megatron_jobs" / "logits.py", ["load", str(out / "jobs.json")], 3)
    return out


@pytest.fixture(scope="module")
def split(there: Path) -> Path:
    """What Megatron core computes on several ranks, of our translations resharded."""
    jobs = []
    for name, options in SPLIT.items():
        source, target = there / f"{name}.megatron", there / f"{name}.split"
        done = CliRunner().invoke(cli, ["reshard", str(source), str(target), *options.split()])
        assert done.exit_code == 0, done.stderr
        (folder,) = target.glob("iter_*")
        jobs.append({"folder": str(folder), "logits": str(there / f"{name}.split.pt")})
    (there / "split.json").write_text(json.dumps(jobs))
    run_script(JOBS / "megatron_jobs" / "logits.py", ["split", str(there / "split.json")], len(jobs))
    return there


@pytest.fixture(scope="module")
def loaded(megatron: Path, there: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What transformers computes of our translations of Megatron's models, and of those with another choice."""
    out = tmp_path_factory.mktemp("hf")
    for name in FAMILIES:
        convert(megatron / name, out / name, "--to", "hf")
    for name, changes in CHOICES.items():
        convert(megatron / name, out / f"{name}.other", "--to", "hf")
        config = out / f"{name}.other" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    ours = {name: out / name for name in (*FAMILIES, *(f"{name}.other" for name in CHOICES))}
    return by_transformers(ours | {f"{name}.back": there / f"{name}.back" for name in RANDOM_MODELS}, out)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_what_megatron_does(name: str, megatron: Path, loaded: dict[str, dict[str, Any]]) -> None:
    report = loaded[name]
    assert (report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"]) == ([], [], [])
    assert report["model_type"] == EXPECTED.get(name, name)
    expected = torch.load(megatron / f"{name}.logits.pt")
    assert report["logits"].shape == expected.shape == (2, 12, 91)
    assert (report["logits"] - expected).abs().max() < CLOSE


@pytest.mark.parametrize("name", [*MODELS, *RANDOM_MODELS])
def test_megatron_computes_what_transformers_does(name: str, there: Path) -> None:
    ours, theirs = torch.load(there / f"{name}.megatron.pt"), torch.load(there / f"{name}.pt")
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < CLOSE


@pytest.mark.parametrize("name", SPLIT)
def test_megatron_computes_the_same_on_several_ranks(name: str, split: Path) -> None:
    ours, theirs = torch.load(split / f"{name}.split.pt"), torch.load(split / f"{name}.pt")
    assert (ours - theirs).abs().max() < CLOSE


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_a_model_comes_back_from_megatron_with_every_bit_by_its_arguments_alone(
    name: str, there: Path, loaded: dict[str, dict[str, Any]]
) -> None:
    before, after = (load_file(there / folder / "model.safetensors") for folder in (name, f"{name}.back"))
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert array.dtype == after[key].dtype
        assert np.array_equal(array, after[key]), key
    assert (loaded[f"{name}.back"]["logits"] - torch.load(there / f"{name}.pt")).abs().max() < CLOSE


@pytest.mark.parametrize("name", [*RANDOM_MODELS, *NOT_TRANSLATED])
def test_names_are_those_of_files_and_of_memory(name: str, there: Path) -> None:
    configured = configured_model(json.loads((there / name / "config.json").read_text()))
    assert configured is not None
    files = load_file(there / name / "model.safetensors")
    assert shapes_of(configured, "hf") == {key: array.shape for key, array in files.items()}
    memory = json.loads((there / f"{name}.memory.json").read_text())
    parameters = {key: shape for key, shape in shapes_of(configured, "hf_memory").items() if not is_buffer(key)}
    assert list(parameters.items()) == [(key, tuple(shape)) for key, shape in memory.items()]


def shapes_of(configured: ConfiguredModel, dialect: str) -> dict[str, Shape]:
    """The names and shapes of a model in the order of a dialect, without the second name of a tied tensor."""
    model = configured.model
    tie = model.tie(dialect)
    tensors = {one.names[0]: stored_shape(one.packing, one.scope, model.shape) for one in model.stored(dialect)}
    return {name: shape for name, shape in tensors.items() if tie is None or name != tie.alias}


def is_buffer(name: str) -> bool:
    return name.endswith("gate.e_score_correction_bias")


def test_any_other_choice_of_the_configuration_would_show(loaded: dict[str, dict[str, Any]]) -> None:
    for name in CHOICES:
        assert (loaded[f"{name}.other"]["logits"] - loaded[name]["logits"]).abs().max() > 4 * CLOSE, name
