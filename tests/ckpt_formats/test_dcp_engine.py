"""PyTorch's own distributed checkpoints: all that real jobs save is read, and real jobs go on from what we write."""

import json
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.edits import cast
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.state_dicts.keys import ACCELERATE, NESTED, StateKeys
from torch_jobs import launch
from torch_jobs.kinds import KINDS, TRAININGS, Kind
from torch_values import as_torch, same
from trained import alone_in

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SAMPLE = Path(__file__).parents[2] / "sample_checkpoints" / "deepspeed-0.19-zero1-bf16-dp2"
LAYOUTS: dict[str, dict[str, int]] = {
    "w1": {"shards": 1, "tp": 1, "replicas": 1},
    "w2": {"shards": 2, "tp": 1, "replicas": 1},
    "w4": {"shards": 4, "tp": 1, "replicas": 1},
    "2x2": {"shards": 2, "tp": 2, "replicas": 1},
}


@dataclass(frozen=True)
class Job:
    """A checkpoint, the layout of the run to load it, and how it gets there."""

    source: str
    layout: str
    by_universal: bool = False
    """By way of our own format, and back."""
    keys: StateKeys | None = None
    """As which it is written, if not as it was."""

    @property
    def kind(self) -> Kind | None:
        """None for the sample of DeepSpeed."""
        return KINDS.get(self.source)

    @property
    def asked_as(self) -> str:
        """How the run that loads it keys its state."""
        if self.keys == ACCELERATE:
            return "accelerate"
        return self.kind.way.keys if self.kind and self.keys is None else "nested"

    @property
    def asks(self) -> list[str] | None:
        """What there is to ask for beside model and optimizer, if not all that the run that loads it saves."""
        if self.kind is None or self.kind.way.keys == "accelerate":
            return []
        return ["lr_scheduler", "train_state"] if self.keys else None

    @property
    def same_layout(self) -> bool:
        if self.kind is None or self.kind.training.wrapper != "fsdp2":
            return False
        return all(getattr(self.kind.training, key) == degree for key, degree in LAYOUTS[self.layout].items())

    def __str__(self) -> str:
        return f"{self.source}-to-{self.layout}{'-by-universal' * self.by_universal}{'-rekeyed' * bool(self.keys)}"


DEEPSPEED = "deepspeed"
EVERY_LAYOUT = [Job("fsdp2_w2-nested", layout) for layout in LAYOUTS]
# What is written for a layout is the same from any source that has been read right. So each source goes to few layouts:
# to the one that cuts it most, or to its own, and to one rank.
EVERY_SOURCE = [
    Job("fsdp2_w2_tp2_tied_frozen-nested", "w1"),
    Job("fsdp2_w2_tp2_tied_frozen-nested", "2x2"),
    Job("fsdp2_w4-torchtitan", "w1"),
    Job("fsdp2_w4-torchtitan", "w4"),
    Job("hsdp_2x2-nested", "w1"),
    Job(DEEPSPEED, "w2"),
    Job(DEEPSPEED, "2x2"),
]
BY_UNIVERSAL = [
    Job("fsdp2_w2_tp2_tied_frozen-nested", "w4", by_universal=True),
    Job("fsdp2_w4-torchtitan", "2x2", by_universal=True),
    Job("hsdp_2x2-nested", "w2", by_universal=True),
]
OTHER_KINDS = [
    Job("fsdp2_w2-zstd", "w4"),
    Job("fsdp2_w2-no_collectives", "w4"),
    Job("fsdp2_w2-over_larger_world", "w2"),
    Job("fsdp2_w2-accelerate", "w4"),
    Job("fsdp2_w2-accelerate", "w2", keys=NESTED),
    Job("fsdp2_w2-nested", "w1", keys=ACCELERATE),
    Job("fsdp2_w4-torchtitan", "w2", keys=NESTED),
    Job("fsdp2_w2_bf16-nested", "w4"),
    Job("fsdp2_w2_sgd-torchtitan", "w2"),
    Job("fsdp2_w3_amsgrad-nested", "w4"),
    Job("fsdp1_w2-nested", "2x2"),
    Job("ddp_w2-nested", "w2"),
]
JOBS = [*EVERY_LAYOUT, *EVERY_SOURCE, *BY_UNIVERSAL, *OTHER_KINDS]


@pytest.fixture(scope="module")
def zoo() -> Path:
    """The folder of all that real torch has trained and saved."""
    with alone_in("torch_jobs") as folder:
        launch.train(TRAININGS, folder)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def truth(kind: Kind, zoo: Path) -> dict[str, Any]:
    return truth_of(kind, zoo)


@pytest.fixture(scope="module")
def checkpoint(kind: Kind, zoo: Path, truth: dict[str, Any]) -> Checkpoint:
    return opened(kind, zoo, truth)


def truth_of(kind: Kind, zoo: Path) -> dict[str, Any]:
    saved_truth: dict[str, Any] = torch.load(zoo / kind.training.name / "truth.pt", weights_only=False)
    return saved_truth


def opened(kind: Kind, zoo: Path, truth: dict[str, Any]) -> Checkpoint:
    """Its index; an optimizer that numbers its parameters needs to be told their names."""
    order: tuple[str, ...] = ()
    if kind.way.keys == "raw":
        order = tuple(stored(name, kind) for group in truth["groups"] for name in group["names"])
    return open_checkpoint(zoo / str(kind), ReadOptions(order=order))


def stored(name: str, kind: Kind) -> str:
    """A parameter as its checkpoint calls it: DDP's own state dict has the wrapper's name in front."""
    return f"module.{name}" if kind.way.keys == "raw" else name


def assert_is_the_truth(actual: Checkpoint, truth: dict[str, Any], kind: Kind) -> None:
    named = {**actual.parameters, **{alias: actual.parameters[name] for alias, name in actual.aliases.items()}}
    for name, expected in truth["model"].items():
        assert same(named[stored(name, kind)].states[MODEL], expected), name
    for name, states in truth["optimizer"].items():
        parameter = named[stored(name, kind)]
        assert parameter.role == "parameter", name
        assert parameter.states.keys() - {MODEL} == states.keys(), name
        for state, expected in states.items():
            assert same(parameter.states[state], expected), f"{name}/{state}"
    trained = {name for name, parameter in actual.parameters.items() if parameter.role == "parameter"}
    assert trained == {stored(name, kind) for name in truth["optimizer"]}
    known = {name for name, parameter in named.items() if parameter.role != "extra"}
    assert known == {stored(name, kind) for name in truth["model"]}


def test_dcp_reads_every_tensor_that_memory_held(kind: Kind, checkpoint: Checkpoint, truth: dict[str, Any]) -> None:
    assert_is_the_truth(checkpoint, truth, kind)
    left = ["__2_0.distcp, __3_0.distcp"] if kind.way.over else []
    assert [", ".join(notice.names) for notice in checkpoint.notices] == left


def test_dcp_reads_the_groups_that_the_optimizer_held(
    kind: Kind, checkpoint: Checkpoint, truth: dict[str, Any]
) -> None:
    groups = [({**group.options}, list(group.names)) for group in checkpoint.groups]
    expected = [
        (
            {key: value for key, value in group.items() if key != "names"},
            [stored(name, kind) for name in group["names"]],
        )
        for group in truth["groups"]
    ]
    if kind.way.keys == "torchtitan":  # a flat optimizer keeps no order, neither of groups nor in them
        groups, expected = (sorted([(o, sorted(n)) for o, n in some], key=itemgetter(1)) for some in (groups, expected))
    assert_same(groups, expected)


def test_dcp_reads_the_step(kind: Kind, checkpoint: Checkpoint, truth: dict[str, Any]) -> None:
    assert checkpoint.origin.step == (None if kind.way.keys == "accelerate" else truth["step"])


def test_dcp_carries_the_rest(kind: Kind, checkpoint: Checkpoint, truth: dict[str, Any]) -> None:
    rest = {key: unlifted(value, checkpoint) for key, value in checkpoint.extras.items()}
    scheduler = rest.pop("lr_scheduler", None)
    if kind.way.keys != "accelerate":
        assert scheduler == {**truth["scheduler"], "lr_lambdas": [None for _ in truth["groups"]]}
    assert_same(rest, expected_rest(kind, truth))


def expected_rest(kind: Kind, truth: dict[str, Any]) -> dict[str, Any]:
    step, world = truth["step"], kind.training.world
    counters = {"step": step, "ntokens_seen": 1000 * step}
    positions = {rank: {"pos": step * 12 + rank} for rank in range(world)}
    loader = {f"dp_rank_{rank}": {**position, "epoch": 0} for rank, position in positions.items()}
    pickled = {f"pickled_{rank}": pickle.dumps(position) for rank, position in positions.items()}
    return {
        "nested": {**truth["extras"], "train_state": counters},
        "torchtitan": {
            "train_state": counters,
            "dataloader": {"version": 1, "dp_world_size": world, **loader, **pickled},
        },
        "raw": {"step": step},
        "accelerate": {},
    }[kind.way.keys]


def unlifted(value: Value, checkpoint: Checkpoint) -> Any:
    """An extra with its tensors in it again."""
    if isinstance(value, TensorName):
        return as_torch(read(checkpoint.parameters[value.name].weight))
    if isinstance(value, dict):
        return {key: unlifted(item, checkpoint) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(unlifted(item, checkpoint) for item in value)
    return value


def assert_same(a: Any, b: Any) -> None:
    """Equal in type and value, down to the bits of tensors."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert_same(value, b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def test_converted_checkpoint_is_verified_without_findings(kind: Kind, checkpoint: Checkpoint) -> None:
    assert checkpoint.seals or kind.way.zstd, (
        "torch writes a CRC-32 of everything; of what is compressed it lies inside"
    )
    assert find_problems(checkpoint, Execution()) == []


def test_universal_holds_what_the_dcp_holds(
    kind: Kind, checkpoint: Checkpoint, truth: dict[str, Any], tmp_path: Path
) -> None:
    save(checkpoint, tmp_path / "u", writable("universal"))
    again = open_checkpoint(tmp_path / "u")
    assert_is_the_truth(again, truth, kind)
    assert again.groups == checkpoint.groups
    assert find_problems(again, Execution()) == []


@dataclass(frozen=True)
class Made:
    """What real runs made of all jobs, and what torch's own tool did."""

    folder: Path
    output: str

    def target(self, job: Job) -> Path:
        return self.folder / str(job)

    def report(self, job: Job) -> dict[str, Any]:
        return self._of(self.folder / f"{job}.json", lambda file: json.loads(file.read_text()))

    def merged(self, job: Job) -> dict[str, Any]:
        return self._of(self.folder / f"{job}.pt", lambda file: torch.load(file, weights_only=False))

    def _of(self, file: Path, load: Any) -> dict[str, Any]:
        if file.exists():
            out: dict[str, Any] = load(file)
            return out
        match = re.search(rf"{re.escape(str(file))} FAILED: (.*?)(?=\n/|\Z)", self.output, re.DOTALL)
        raise AssertionError(match[1] if match else self.output)


@pytest.fixture(scope="module")
def written(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("dcp")
    deepspeed = out / "deepspeed"
    deepspeed.mkdir()
    torch.save(truth_of_deepspeed(), deepspeed / "truth.pt")
    resumes, merges = [], []
    for job in JOBS:
        write(job, zoo, out)
        layout = {**LAYOUTS[job.layout], "wrapper": "fsdp2"}
        if job.kind:
            named = {"training": job.kind.training.name, "truth": zoo / job.kind.training.name / "truth.pt"}
            changes: dict[str, Any] = layout
        else:
            named = {"training": "fsdp2_w2", "truth": deepspeed / "truth.pt"}
            changes = {**layout, "model": "gpt", "hidden": 32, "scheduler": False}
        target = out / str(job)
        request = {"checkpoint": target, "report": out / f"{job}.json", "keys": job.asked_as, "asks": job.asks}
        resumes.append({**named, **request, "changes": changes})
        if job.asked_as != "accelerate":
            merges.append({"checkpoint": target, "out": out / f"{job}.pt"})
    return Made(out, launch.resume_all(resumes, out) + launch.merge_all(merges, out))


def write(job: Job, zoo: Path, out: Path) -> None:
    """Write the checkpoint of a job as ours does."""
    source = opened(job.kind, zoo, truth_of(job.kind, zoo)) if job.kind else cast(open_checkpoint(SAMPLE), "fp32")
    if job.by_universal:
        save(source, out / f"{job}.universal", writable("universal"))
        source = open_checkpoint(out / f"{job}.universal")
    layout = LAYOUTS[job.layout]
    degrees = {"dp": layout["shards"], "tp": layout["tp"] if layout["tp"] > 1 else None}
    save(source, out / str(job), writable("dcp", keys=job.keys, **degrees))


def truth_of_deepspeed() -> dict[str, Any]:
    """The sample's truth as a run in fp32 has it: its masters are the weights."""
    with safe_open(SAMPLE / "truth.safetensors", "pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tree: dict[str, Any] = {"model": {}, "optimizer": {}, "scheduler": None, "step": int(about["step"])}
    for key, tensor in tensors.items():
        name, _, state = key.rpartition("/")
        if state in ("fp32", "frozen", "buffer"):
            tree["model"][name] = tensor
        elif state != "lp":
            tree["optimizer"].setdefault(name, {"step": torch.tensor(float(about["step"]))})[state] = tensor
    return {**tree, "groups": json.loads(about["param_groups"])}


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_run_of_any_layout_holds_what_the_sources_run_held(job: Job, written: Made) -> None:
    report = written.report(job)
    assert report["mismatches"] == {}
    assert report["step"]["found"] == report["step"]["truth"]
    for truth, loaded in zip(report["groups"]["truth"], report["groups"]["found"], strict=True):
        assert loaded["names"] == truth["names"]
        assert {key: truth.get(key) for key in loaded} == loaded
    assert all(report["extras"].values())
    assert report["scheduler"]["found"] == report["scheduler"]["truth"]
    assert len(report["extras"]) == (6 if job.asks is None and job.asked_as == "nested" else 0)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_converted_checkpoint_computes_what_its_source_computes(job: Job, written: Made) -> None:
    report = written.report(job)
    assert abs(report["evaluation"] - report["expected"]["evaluation"]) <= ROUNDING[dtype_of(job)]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_training_goes_on_from_a_converted_dcp(job: Job, written: Made) -> None:
    report = written.report(job)
    actual, expected = report["losses_after"], report["expected"]["losses_after"]
    assert len(actual) == len(expected) == 2
    drift = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    assert drift <= (0.0 if job.same_layout else SUMMATION[dtype_of(job)])


SUMMATION = {"fp32": 5e-6, "bf16": 5e-4}
"""How far two losses drift apart when gradients are summed over other ranks, by type of the weights."""
ROUNDING = {"fp32": 1e-6, "bf16": 2e-4}
"""How far one loss is off when a product of matrices is summed in parts."""


def dtype_of(job: Job) -> str:
    return job.kind.training.dtype if job.kind else "fp32"


@pytest.mark.parametrize("job", [job for job in JOBS if job.asked_as != "accelerate"], ids=str)
def test_torchs_own_tool_reads_the_same_of_ours(job: Job, written: Made, zoo: Path) -> None:
    merged = written.merged(job)
    truth = truth_of(job.kind, zoo) if job.kind else truth_of_deepspeed()
    model, optimizer = (merged["model"], merged["optim"]) if job.asked_as == "nested" else split(merged, truth)
    for name, expected in truth["model"].items():
        assert_same(model[name], expected)
    assert set(model) == set(truth["model"])
    for name, states in truth["optimizer"].items():
        assert optimizer["state"][name].keys() == states.keys()
        for state, expected in states.items():
            assert_same(optimizer["state"][name][state], expected)


def split(merged: Mapping[str, Any], truth: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """TorchTitan's tree as a nested one."""
    model = {name: value for name, value in merged.items() if isinstance(value, torch.Tensor)}
    states: dict[str, dict[str, Any]] = {name: {} for name in truth["optimizer"]}
    for key, value in merged["optimizer"].items():
        part, _, rest = key.partition(".")
        if part == "state":
            name, _, state = rest.rpartition(".")
            states[name][state] = value
    return model, {"state": states}


VICTIM = "model.tok_embeddings.weight"


@dataclass(frozen=True)
class Broken:
    """Two checkpoints broken by hand, and what torch's own tool makes of them."""

    flipped: Path
    missing: Path
    merged: dict[str, torch.Tensor]
    truth: torch.Tensor


@pytest.fixture(scope="module")
def broken(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    out = tmp_path_factory.mktemp("broken")
    flipped, missing = out / "flipped", out / "missing"
    for folder in (flipped, missing):
        shutil.copytree(zoo / "fsdp2_w2-nested", folder)
    metadata = pickle.loads((flipped / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == VICTIM)
    place = metadata.storage_data[index]
    flip(flipped / place.relative_path, place.offset + place.length // 2)
    lost = metadata.state_dict_metadata[VICTIM].chunks.pop()
    del metadata.storage_data[type(index)(VICTIM, lost.offsets)]
    (missing / ".metadata").write_bytes(pickle.dumps(metadata))
    jobs = [{"checkpoint": folder, "out": out / f"{folder.name}.pt"} for folder in (flipped, missing)]
    assert launch.merge_all(jobs, out) == ""
    merged = {job["out"].stem: torch.load(job["out"])["model"]["tok_embeddings.weight"] for job in jobs}
    truth = truth_of(KINDS["fsdp2_w2-nested"], zoo)["model"]["tok_embeddings.weight"]
    return Broken(flipped, missing, merged, truth)


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 0b0000_0100]))


def test_a_flipped_bit_that_torch_takes_is_refused_by_name(broken: Broken, tmp_path: Path) -> None:
    assert (broken.merged["flipped"] != broken.truth).sum() == 1
    source = open_checkpoint(broken.flipped)
    assert [VICTIM in str(finding) for finding in find_problems(source, Execution())] == [True]
    with pytest.raises(CorruptError, match=re.escape(VICTIM)):
        save(source, tmp_path / "u", writable("universal"))
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_in_what_was_compressed_is_refused_by_name(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "flipped"
    shutil.copytree(zoo / "fsdp2_w2-zstd", folder)
    stored_at = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    place = next(place for index, place in stored_at.items() if index.fqn == VICTIM)
    flip(folder / place.relative_path, place.offset + place.length // 2)
    source = open_checkpoint(folder)
    assert any(VICTIM.removeprefix("model.") in str(finding) for finding in find_problems(source, Execution()))
    with pytest.raises((CorruptError, IncompleteError), match=re.escape(VICTIM.removeprefix("model."))):
        save(source, tmp_path / "u", writable("universal"))
    assert not (tmp_path / "u").exists()


def test_a_missing_chunk_that_torch_takes_is_refused_with_tensor_and_box(broken: Broken, tmp_path: Path) -> None:
    assert broken.merged["missing"].shape == broken.truth.shape
    with pytest.raises(IncompleteError, match=r"tok_embeddings\.weight.*\[126:251, 0:48\]"):
        save(open_checkpoint(broken.missing), tmp_path / "u", writable("universal"))
    assert list(tmp_path.iterdir()) == []
