"""Models of Megatron core that became transformers', and the other way: both compute the same."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.launch import run_script
from hf_jobs.models import MODELS
from hf_jobs.random_models import NOT_IN_MEGATRON, names
from megatron_jobs.families import EXPECTED, FAMILIES, INPUT
from trained import once
from translated_models import (
    CLOSE,
    JOBS,
    ON_GPUS,
    assert_close,
    assert_same_bits,
    by_transformers,
    convert,
    save_models,
    split,
    translate,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

WITH_EXPERTS = ("qwen2_moe-1", "qwen3_moe-1", "glm4_moe-1", "gpt_oss-2", "deepseek_v2-1", "deepseek_v3-1")
RANDOM_MODELS = [*(name for name in names(1) if name.partition("-")[0] not in NOT_IN_MEGATRON), *WITH_EXPERTS]
COMPUTED = [name for name in (*MODELS, *RANDOM_MODELS) if not name.startswith(ON_GPUS)]
SPLIT = {
    "llama-1-even": "--tp 2 --pp 2",
    "mixtral-0-even": "--ep 2 --etp 1",
    "qwen2_moe-1-even": "--tp 2 --ep 2 --etp 2",
    "qwen3_moe-1-even": "--pp 2",
    "glm4_moe-1-even": "--tp 2 --ep 2 --etp 1",
    "gpt_oss-2-even": "--tp 2 --pp 2 --ep 2 --etp 1",
    "deepseek_v3-2-even": "--tp 2 --pp 2 --ep 2 --etp 1",
}
"""Models of even sizes, and the ranks over which they are resharded."""
INPUT_LENGTH = len(INPUT[0])
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
    translated = [*MODELS, *RANDOM_MODELS, *SPLIT]
    save_models(translated, out)
    translate(translated, out)
    return out


@pytest.fixture(scope="module")
def ranks(there: Path) -> Path:
    """What Megatron core computes on several ranks, of our translations resharded."""
    split(SPLIT, there)
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


@pytest.mark.parametrize("name", COMPUTED)
def test_megatron_computes_what_transformers_does(name: str, there: Path) -> None:
    assert_close(there / f"{name}.megatron.pt", there / f"{name}.pt")


@pytest.mark.parametrize("name", SPLIT)
def test_megatron_computes_the_same_on_several_ranks(name: str, ranks: Path) -> None:
    assert_close(ranks / f"{name}.split.pt", ranks / f"{name}.pt")


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_a_model_comes_back_from_megatron_with_every_bit_by_its_arguments_alone(
    name: str, there: Path, loaded: dict[str, dict[str, Any]]
) -> None:
    assert_same_bits(there / f"{name}.back", there / name)
    own = torch.load(there / f"{name}.pt")[:, -INPUT_LENGTH:]  # after those of layers for multi-token prediction
    assert (loaded[f"{name}.back"]["logits"] - own).abs().max() < CLOSE


def test_any_other_choice_of_the_configuration_would_show(loaded: dict[str, dict[str, Any]]) -> None:
    for name in CHOICES:
        assert (loaded[f"{name}.other"]["logits"] - loaded[name]["logits"]).abs().max() > 4 * CLOSE, name
