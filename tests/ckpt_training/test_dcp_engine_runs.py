"""Live runs of torch, sharded in any way, load what other runs and engines have saved, and save, through DCP."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckpt
from dcp_jobs import launch
from torch_jobs import launch as torch_launch
from trained import alone_in

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

ZERO3 = Path(__file__).parents[2] / "sample_checkpoints" / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"
OF_THE_RUN = {"foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class Job:
    """A source, and the run that loads it."""

    training: str
    source: Callable[[Path, Path], str | Path]
    """Where it is, or is saved, by the folder of what torch has saved and a folder of this source's own."""
    keys: str = "nested"
    asks: tuple[str, ...] | None = None
    """What the state dict has besides model and optimizer; None: all that torch has saved."""
    changes: dict[str, Any] = field(default_factory=dict)
    drift: float = 0.0
    """How far two losses may be off those of the run that went on: 0, if gradients are summed over equal ranks."""


def coded(zoo: Path, own: Path) -> Path:
    ckpt.save(ckpt.open(zoo / "fsdp2_w2-nested"), own / "coded", ckpt.Universal(codec="auto"))
    return own / "coded"


def chain(zoo: Path, own: Path) -> str:
    source = ckpt.open(zoo / "fsdp2_w2-nested")
    ckpt.Chain(own / "run.chain").append(source)
    return f"{own / 'run.chain'}@{source.step}"


def damaged(zoo: Path, own: Path) -> Path:
    """A checkpoint with a flipped bit in a tensor that both ranks have a part of, stored in one file."""
    ckpt.save(ckpt.open(zoo / "fsdp2_w2-nested"), own / "damaged", ckpt.DCP(dp=1))
    file = own / "damaged" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    values = ckpt.open(own / "damaged")["tok_embeddings.weight"][:4].tobytes()
    data[data.index(values) + 9] ^= 2
    file.write_bytes(data)
    return own / "damaged"


JOBS = {
    "coded_to_fsdp_and_tp": Job("fsdp2_w2", coded, changes={"tp": 2}, drift=5e-6),
    "chain_to_fsdp2": Job("fsdp2_w2", chain),
    "torchtitan_to_torchtitan": Job("fsdp2_w2", lambda zoo, own: zoo / "fsdp2_w2-torchtitan", "torchtitan"),
    "accelerate_to_nested": Job("fsdp2_w2", lambda zoo, own: zoo / "fsdp2_w2-accelerate", asks=()),
    "fsdp1_to_fsdp1": Job("fsdp1_w2", lambda zoo, own: zoo / "fsdp1_w2-nested"),
    "zero3_to_fsdp2": Job(
        "fsdp2_w2",
        lambda zoo, own: ZERO3,
        asks=(),
        changes={"model": "gpt", "hidden": 32, "scheduler": False, "tied": True, "frozen": True},
        drift=5e-6,
    ),
}


def truth_of_zero3() -> dict[str, Any]:
    """What a run in fp32 has: the masters are its weights."""
    with safe_open(ZERO3 / "truth.safetensors", "pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tree: dict[str, Any] = {"model": {}, "optimizer": {}, "scheduler": None, "step": int(about["step"])}
    for key, tensor in tensors.items():
        name, _, state = key.rpartition("/")
        if state in ("fp32", "frozen", "buffer"):
            tree["model"][name] = tensor.float() if state == "frozen" else tensor
        elif state != "lp":
            tree["optimizer"].setdefault(name, {"step": torch.tensor(float(about["step"]))})[state] = tensor
    tree["model"]["head.weight"] = tree["model"]["word.weight"]
    return {**tree, "groups": json.loads(about["param_groups"])}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each job reports; under `damaged`, what each rank does; under `saved`, what both writers have saved."""
    out = tmp_path_factory.mktemp("read")
    with alone_in("torch_jobs") as zoo:
        torch_launch.train({job.training for job in JOBS.values()}, zoo)
        torch.save(truth_of_zero3(), out / "truth.pt")
        jobs = [
            {
                "work": "load",
                "checkpoint": job.source(zoo, out),
                "training": job.training,
                "truth": out / "truth.pt" if name.startswith("zero3") else zoo / job.training / "truth.pt",
                "report": out / f"{name}.json",
                "keys": job.keys,
                "asks": job.asks,
                "changes": job.changes,
            }
            for name, job in JOBS.items()
        ]
        jobs.append({**jobs[1], "checkpoint": damaged(zoo, out), "report": out / "damaged", "work": "refuse"})
        jobs += [{**jobs[number], "report": out / f"saved{number}", "work": "save"} for number in range(2)]
        launch.run_all(jobs, out)
    reports = {name: json.loads((out / f"{name}.json").read_text()) for name in JOBS}
    reports["saved"] = [[out / f"saved{number}.{writer}" for writer in ("own", "torch")] for number in range(2)]
    return reports | {"damaged": [json.loads((out / f"damaged.{rank}").read_text()) for rank in range(2)]}


@pytest.mark.parametrize("name", JOBS)
def test_run_has_every_bit_of_the_source(reports: dict[str, Any], name: str) -> None:
    report, job = reports[name], JOBS[name]
    assert report["mismatches"] == {}
    assert report["step"]["found"] == report["step"]["truth"]
    assert report["scheduler"]["found"] == report["scheduler"]["truth"]
    assert all(report["extras"].values())
    assert len(report["extras"]) == (6 if job.asks is None and job.keys == "nested" else 0)
    for truth, loaded in zip(report["groups"]["truth"], report["groups"]["found"], strict=True):
        assert {key: truth.get(key) for key in loaded if key not in OF_THE_RUN} == {
            key: value for key, value in loaded.items() if key not in OF_THE_RUN
        }


@pytest.mark.parametrize("name", JOBS)
def test_losses_go_on_from_the_source(reports: dict[str, Any], name: str) -> None:
    actual, expected = reports[name]["losses_after"], reports[name]["expected"]["losses_after"]
    assert len(actual) == len(expected) == 2
    assert max(abs(a - b) for a, b in zip(actual, expected, strict=True)) <= JOBS[name].drift


def test_flipped_bit_raises_on_both_ranks(reports: dict[str, Any]) -> None:
    for error in reports["damaged"]:
        assert error["kind"] == "CorruptError"
        assert "`tok_embeddings.weight` model" in error["text"]
        assert "__0_0.distcp" in error["text"]


@pytest.mark.parametrize("number", range(2), ids=["fsdp_and_tp", "fsdp2"])
def test_saved_run_is_what_torchs_writer_saves(reports: dict[str, Any], number: int) -> None:
    own, torchs = (ckpt.open(path) for path in reports["saved"][number])
    assert ckpt.diff(own, torchs).same
    assert {name: one.role for name, one in own.items()} == {name: one.role for name, one in torchs.items()}
    assert own.groups == torchs.groups
    assert own.extras == torchs.extras
    assert own.step == torchs.step == 1
    assert ckpt.verify(own) == []
