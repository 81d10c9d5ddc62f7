"""Published steps of live runs of real engines have the bits that the engines gather, and all ranks skip the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt_formats.core.errors import UnsupportedError
from ckpt_training import Publisher
from engines.launch import run_script
from object_stores import BUCKET, moto, reached
from saving_jobs.steps import FREE, STEPS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KINDS = ("ddp", "fsdp2-store", "fsdp1_flat_2x2", "zero1_fp16", "zero2", "zero3", "megatron_2x2")
SCRIPT = Path(__file__).parents[1] / "jobs/saving_jobs/publish.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all published runs, for a user of the store that has one of them."""
    out = tmp_path_factory.mktemp("published")
    with moto() as server, reached(server):
        run_script(SCRIPT, [str(out), *(kind.replace("-", ":") for kind in KINDS)], len(KINDS))
        yield out


@pytest.mark.parametrize("kind", KINDS)
def test_published_steps_have_the_bits_that_the_engine_gathers(kind: str, runs: Path) -> None:
    is_stored = kind.endswith("-store")
    chain = ckpt.Chain(f"s3://{BUCKET}/{kind}/policy.chain" if is_stored else runs / kind / "policy.chain")
    steps: list[int] = list(chain)
    log = json.loads((runs / kind / "log-0.json").read_text())
    assert {step for step, _ in log["published"]} <= set(steps)
    assert steps[-1] == log["last"][0]
    for step in steps[kind == "megatron_2x2" :]:
        published = chain[step]
        truth = truth_of(runs / kind, step)
        own = {name: np.asarray(one.weight).tobytes() for name, one in published.parameters.items()}
        assert own == {name: value for name, value in truth.items() if name not in published.aliases}, step
        assert all(truth.get(alias, own[name]) == own[name] for alias, name in published.aliases.items())


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_publish_the_same_steps(kind: str, runs: Path) -> None:
    logs = [json.loads(one.read_text()) for one in sorted((runs / kind).glob("log-*.json"))]
    assert len({json.dumps(one["published"]) for one in logs}) == 1
    assert [kind for _, kind in logs[0]["published"][:2]] == ["base", "delta"]
    assert len(logs[0]["published"]) == STEPS[-1] + 1 or kind == "zero1_fp16"
    assert logs[0]["last"][1] <= FREE
    failures = [failure for one in logs for failure in one["failures"]]
    assert len(failures) == (2 if kind == "ddp" else 0)
    assert all("rank 1: the process that writes the published steps has ended" in one for one in failures)


def truth_of(folder: Path, step: int) -> dict[str, bytes]:
    """The weights at a step, by name."""
    engine = folder / f"engine-{step}"
    if not engine.exists():
        with np.load(folder / f"truth-{step}.npz") as arrays:
            return {name: value.tobytes() for name, value in arrays.items()}
    source = ckpt.use_names(ckpt.open(engine), "hf", folder / "config.json")
    return {
        name: np.asarray(one.states["model"]).tobytes()
        for name, one in source.parameters.items()
        if one.role != "extra"
    }


def model_of(kind: str, **sizes: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 61}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**common, **sizes))


def test_a_model_of_transformers_is_published_as_it_saves_itself(tmp_path: Path) -> None:
    model = model_of("Mixtral", intermediate_size=48, num_key_value_heads=2, num_local_experts=3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    with Publisher(model, optimizer, tmp_path / "policy.chain", files={"tokenizer.json": tokenizer}) as publisher:
        tokens = torch.arange(24).reshape(2, 12)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        publisher.wait(timeout=60.0)
    ckpt.save(ckpt.Chain(tmp_path / "policy.chain")[1], tmp_path / "published", "hf")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "own")

    def content(name: str) -> tuple[dict[str, bytes], Any]:
        opened = ckpt.open(tmp_path / name)
        weights = {name: np.asarray(one.weight).tobytes() for name, one in opened.items()}
        return weights, json.loads((tmp_path / name / "config.json").read_text())

    assert content("published") == content("own")
    assert json.loads((tmp_path / "published/tokenizer.json").read_text()) == {}


def test_a_model_that_transformers_saves_in_another_form_is_refused(tmp_path: Path) -> None:
    model = model_of("Olmoe", num_experts=2, num_experts_per_tok=1, num_key_value_heads=2)
    with pytest.raises(UnsupportedError, match=r"transformers stores .* in another form"):
        Publisher(model, None, tmp_path / "policy.chain")
    assert not (tmp_path / "policy.chain").exists()
