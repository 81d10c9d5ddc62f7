"""Published steps of live runs of real engines have the bits that the engines gather, and all ranks skip the same."""

import json
from pathlib import Path

import numpy as np
import pytest

import ckpt
from engines.launch import run_script
from saving_jobs.steps import FREE, STEPS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KINDS = ("ddp", "fsdp2", "hsdp_2x2", "fsdp1_flat_2x2", "divided", "zero1_fp16", "zero2", "zero3", "megatron_2x2")
SCRIPT = Path(__file__).parents[1] / "jobs/saving_jobs/publish.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all published runs."""
    out = tmp_path_factory.mktemp("published")
    run_script(SCRIPT, [str(out), *KINDS], len(KINDS))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_published_steps_have_the_bits_that_the_engine_gathers(kind: str, runs: Path) -> None:
    chain = ckpt.Chain(runs / kind / "policy.chain")
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
