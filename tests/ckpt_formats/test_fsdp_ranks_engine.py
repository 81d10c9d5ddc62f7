"""What real FSDP jobs leave in files of each rank, against what torch itself gathers from the live job."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import writable
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from rank_jobs import launch
from rank_jobs.kinds import KINDS, Kind
from torch_values import same
from trained import alone_in

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Job:
    """One job's files, and what it held."""

    kind: Kind
    folder: Path
    truth: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / "ckpt"

    @property
    def named(self) -> bool:
        """Can its optimizer be told to names?"""
        return self.kind.optimizer != "none" and (self.kind.orig or self.kind.optimizer == "named")

    def open(self) -> Checkpoint:
        """With what the user has to say about such files."""
        order = tuple(n for group in self.truth["groups"] for n in group) if self.kind.optimizer == "raw" else ()
        return open_checkpoint(
            self.path,
            ReadOptions(
                order=order if self.named else (), shapes=None if self.shapes is None else open_checkpoint(self.shapes)
            ),
        )

    @property
    def shapes(self) -> Path | None:
        """A checkpoint of the same model, with other values."""
        if self.kind.state != "local":
            return None
        path = self.folder / "other.pt"
        if not path.exists():
            torch.save({name: torch.zeros_like(tensor) for name, tensor in self.truth["model"].items()}, path)
        return path


@pytest.fixture(scope="session")
def jobs() -> Path:
    """The folder of every kind."""
    with alone_in("rank_jobs") as folder:
        launch.train(KINDS, folder)
    return folder


@pytest.fixture(params=KINDS)
def job(request: pytest.FixtureRequest, jobs: Path) -> Job:
    folder = jobs / request.param
    return Job(KINDS[request.param], folder, torch.load(folder / "truth.pt", weights_only=False))


def job_of(jobs: Path, name: str) -> Job:
    return Job(KINDS[name], jobs / name, torch.load(jobs / name / "truth.pt", weights_only=False))


def assert_is_the_truth(actual: Checkpoint, job: Job) -> None:
    truth = job.truth
    for name, expected in truth["model"].items():
        parameter = actual.parameters[actual.aliases.get(name, name)]
        assert same(parameter.states[MODEL], expected), name
    assert {p.name for p in actual.parameters.values() if p.role != "extra"} == truth["model"].keys() - actual.aliases
    for name in truth["buffers"] if job.named else ():
        assert actual.parameters[name].role in ("buffer", "frozen"), name
    if not job.named:
        assert not actual.groups
        return
    for name, states in truth["optim"].items():
        parameter = actual.parameters[actual.aliases.get(name, name)]
        assert parameter.role == "parameter"
        assert parameter.states.keys() == states.keys() | {MODEL}, name
        for state, expected in states.items():
            assert same(parameter.states[state], expected), f"{name}/{state}"
    assert [list(group.names) for group in actual.groups] == [
        [actual.aliases.get(name, name) for name in names] for names in truth["groups"]
    ]


def test_fsdp_ranks_reads_the_values_of_the_job(job):
    assert detect(job.path).name == "fsdp-ranks"
    checkpoint = job.open()
    assert_is_the_truth(checkpoint, job)
    assert checkpoint.origin.layout["world"] == job.kind.world
    assert find_problems(checkpoint, Execution()) == []


def test_converted_checkpoint_has_the_values_of_the_job(job, tmp_path):
    save(job.open(), tmp_path / "u", writable("universal"))
    checkpoint = open_checkpoint(tmp_path / "u")
    assert_is_the_truth(checkpoint, job)
    assert find_problems(checkpoint, Execution()) == []


def test_torch_loads_converted_files_of_ranks(job, tmp_path):
    save(job.open(), tmp_path / "m.pt", writable("torch"))
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    for name, expected in job.truth["model"].items():
        assert torch.equal(loaded["model"][name], expected), name
    optimizer = loaded.get("optim", loaded.get("optimizer"))
    for name, states in job.truth["optim"].items() if job.named else ():
        for state, expected in states.items():
            assert torch.equal(optimizer["state"][name][state], expected), f"{name}/{state}"


def test_open_reads_headers_only(job, monkeypatch):
    """Opening reads no tensor but the meshes and one step count of each rank: a few bytes of any model."""
    seen = 0

    def count(file, buffers, offset):
        nonlocal seen
        got = preadv(file, buffers, offset)
        seen += got
        return got

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", count)
    job.open()
    assert seen <= job.kind.world * 200


def test_each_rank_is_drawn_at_its_place_in_the_mesh(jobs):
    shards = job_of(jobs, "fsdp2_tp_2x2").open().files
    places = {shard.path.name: dict(shard.rank) for shard in shards if shard.role == "model"}
    assert places["model_world_size_4_rank_2.pt"] == {"rank": 2, "shards": 1, "tp": 0}
    assert job_of(jobs, "fsdp2_hsdp_2x2").open().origin.layout["mesh"] == {"replicas": 2, "shards": 2}


def test_verify_compares_copies_of_ranks(jobs):
    """Every rank of the other replica, and for plain tensors every rank, is a copy: by what the files say of them."""
    parameters = job_of(jobs, "fsdp2_hsdp_2x2").open().parameters
    assert len(parameters["embed.weight"].weight.replicas) == 1
    assert len(parameters["scale"].weight.replicas) == 3
    assert len(job_of(jobs, "fsdp1_hsdp_2x2").open().parameters["embed.weight"].weight.replicas) == 1
    assert len(job_of(jobs, "fsdp2_w2").open().parameters["embed.weight"].weight.replicas) == 0


def test_fsdp_ranks_reads_tied_weights_as_one(jobs):
    checkpoint = job_of(jobs, "fsdp2_w2_tied").open()
    assert dict(checkpoint.aliases) == {"head.weight": "embed.weight"}


def test_fsdp_ranks_removes_wrappers_from_names_with_a_note(jobs):
    for name in ("fsdp2_w4_compiled", "ddp_w2"):
        job = job_of(jobs, name)
        checkpoint = job.open()
        assert checkpoint.parameters.keys() >= job.truth["model"].keys()
        assert any("_orig_mod" in notice for notice in checkpoint.notices)


def test_fsdp_ranks_carries_values_of_each_rank(job):
    extras, parameters = job.open().extras, job.open().parameters
    first = extras if job.kind.saver == "verl" else extras["random_states"]
    assert first["lr_scheduler"]["last_epoch"] == 3
    for rank in range(job.kind.world):
        own = first if rank == 0 else extras["ranks"][str(rank)]
        own = own if job.kind.saver == "verl" or rank == 0 else own["random_states"]
        assert read(parameters[own["rng"].name].weight).tolist() == [rank] * 8


def test_flat_parameters_without_shapes_say_what_to_pass(jobs):
    for name in ("fsdp1_local_w2", "fsdp1_local_w2_bare", "fsdp1_local_w3_raw"):
        with pytest.raises(UnsupportedError) as caught:
            open_checkpoint(job_of(jobs, name).path)
        assert "--shapes" in caught.value.hint


def test_shapes_of_another_model_are_refused(jobs):
    job = job_of(jobs, "fsdp1_local_w2")
    other = job.folder / "narrow.pt"
    torch.save({name: tensor.flatten()[:-1] for name, tensor in job.truth["model"].items() if tensor.dim()}, other)
    with pytest.raises(CkptError, match="elements"):
        open_checkpoint(job.path, ReadOptions(shapes=open_checkpoint(other)))


def test_states_of_whole_units_are_carried_as_each_rank_has_them(jobs):
    job = job_of(jobs, "fsdp1_w2_flat_raw")
    checkpoint = job.open()
    assert any("use_orig_params" in notice for notice in checkpoint.notices)
    for rank in range(2):
        theirs = torch.load(job.path / f"optim_world_size_2_rank_{rank}.pt")["state"][0]["exp_avg"]
        carried = checkpoint.extras["ranks"][str(rank)]["optim"]["state"][0]["exp_avg"]
        assert same(checkpoint.parameters[carried.name].weight, theirs)


def test_slices_that_are_numbered_without_an_order_are_not_guessed(jobs):
    job = job_of(jobs, "fsdp1_w2_raw")
    checkpoint = open_checkpoint(job.path)
    assert not checkpoint.groups
    assert any("--param-order" in notice for notice in checkpoint.notices)
    assert {"0", "1"} == checkpoint.extras["ranks"].keys()
