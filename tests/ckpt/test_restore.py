"""States of a chain restored in other formats and layouts, and chains made shorter without losing one that stays."""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt as library
from ckpt_cli.views.chain_log import accuracy
from ckpt_formats.core import files as reader_files
from ckpt_formats.core.files import Reader
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file
from damage import ckpt
from dcp_states import loaded
from held import checkpoint, contents, parameter
from training import Net, chained

STEPS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of six states, `step1` to `step6`, and their chain."""
    return chained(tmp_path_factory.mktemp("whole"), STEPS)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """The chain, to be changed."""
    import shutil

    return shutil.copytree(whole / "run", tmp_path / "run")


@pytest.mark.quick(4)
@pytest.mark.parametrize("form", ["universal", "dcp", "torch"])
@pytest.mark.parametrize("step", [1, 3, None])
def test_restore_writes_any_step_in_any_format(form: str, step: int | None, whole: Path, tmp_path: Path) -> None:
    options = () if step is None else ("--step", step)
    done = ckpt("restore", whole / "run", tmp_path / "out", "--to", form, *options, "--json")
    assert done.code == 0, done.err
    assert detect(tmp_path / "out").name == form
    assert contents(open_checkpoint(tmp_path / "out")) == contents(open_checkpoint(whole / f"step{step or STEPS}"))
    assert os.listdir(tmp_path) == ["out"]


def test_torch_loads_what_is_restored_and_trains_on(whole: Path, tmp_path: Path) -> None:
    saved = torch.load(whole / "step4", weights_only=False)
    ckpt("restore", whole / "run", tmp_path / "it.pt", "--step", 4, "--to", "torch")
    net = Net()
    net.load_state_dict(torch.load(tmp_path / "it.pt", weights_only=True)["model"])
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, saved["model"][name])
    ckpt("restore", whole / "run", tmp_path / "dcp", "--step", 4, "--to", "dcp")
    assert json.dumps(sorted(map(str, loaded(tmp_path / "dcp"))))  # PyTorch's own reader takes it


def test_restore_writes_for_the_requested_number_of_ranks(whole: Path, tmp_path: Path) -> None:
    done = ckpt("restore", whole / "run", tmp_path / "out", "--to", "deepspeed", "--zero", 1, "--dp", 3)
    assert done.code == 0, done.err
    assert len(list((tmp_path / "out").rglob("*optim_states.pt"))) == 3
    done = ckpt("restore", whole / "run", tmp_path / "no", "--dp", 3)
    assert done.code == 2
    assert not (tmp_path / "no").exists()


def test_restore_refuses_a_step_that_is_not_there(whole: Path, tmp_path: Path) -> None:
    done = ckpt("restore", whole / "run", tmp_path / "out", "--step", 99)
    assert done.code == 10
    assert "from 1 to 6" in done.err
    assert ckpt("restore", whole / "step1", tmp_path / "out", "--step", 99).code == 10
    assert ckpt("log", whole / "step1").code == 10
    assert f"Name the whole chain: {whole / 'run'}" in ckpt("log", whole / "run@2").err
    assert os.listdir(tmp_path) == []


def test_a_dry_run_of_restore_writes_nothing(whole: Path, tmp_path: Path) -> None:
    done = ckpt("restore", whole / "run", tmp_path / "out", "--to", "dcp", "--dry-run", "--json")
    assert done.code == 0
    assert json.loads(done.out)["format"] == "dcp"
    assert os.listdir(tmp_path) == []


def test_a_target_inside_the_chain_is_refused(run: Path) -> None:
    before = sorted(os.listdir(run))
    assert ckpt("restore", run, run / "out").code == 30
    assert sorted(os.listdir(run)) == before


def test_log_tells_sizes_and_costs(whole: Path) -> None:
    run = whole / "run"
    report = json.loads(ckpt("log", run, "--json").out)
    assert [step["step"] for step in report["steps"]] == [1, 2, 3, 4, 5, 6]
    stored = [
        sum(path.stat().st_size for path in (run / step["folder"]).rglob("*") if path.is_file())
        for step in report["steps"]
    ]
    assert [step["stored_nbytes"] for step in report["steps"]] == stored
    assert [step["restore"]["reads_nbytes"] for step in report["steps"]] == [sum(stored[: i + 1]) for i in range(STEPS)]
    assert report["stored_nbytes"] == sum(stored)
    assert report["raw_nbytes"] == sum(step["raw_nbytes"] for step in report["steps"])
    assert report["exact"] is True
    text = ckpt("log", run).out
    assert re.search(r"iB +5  ", text)  # deltas to replay
    assert "█▁" in text or "█▂" in text


def test_log_names_states_that_are_not_complete(run: Path) -> None:
    assert json.loads(ckpt("log", run, "--json").out)["unfinished"] == []
    (run / ".step-0000000099.ckpt-partial").mkdir()
    (run / ".step-0000000099.ckpt-partial" / "journal.jsonl").touch()
    (unfinished,) = json.loads(ckpt("log", run, "--json").out)["unfinished"]
    assert unfinished["folder"] == "step-0000000099"
    assert 0 <= unfinished["seconds"] < 600
    assert "unfinished: step-0000000099, written " in ckpt("log", run).out


def test_log_tells_the_worst_of_all_tensors(whole: Path) -> None:
    member = chain_file.read(whole / "run").members[-1]
    losses = {"master": {"rel": 0.5, "max_abs": 1.0}, "exp_avg": {"rel": 0.25, "max_abs": 3.0}}
    for order in (losses, dict(reversed(losses.items()))):
        assert accuracy(replace(member, errors=order)) == "approximate: rel 0.5, max 3"
    assert accuracy(member) == "exact"


KEPT = {
    ("--keep", "last:2"): [5, 6],
    ("--keep", "last:99"): [1, 2, 3, 4, 5, 6],
    ("--keep", "every:2"): [2, 4, 6],
    ("--keep", "every:4"): [4, 6],
    ("--keep", "1,3"): [1, 3, 6],
    ("--keep", "last:1", "--keep", "2,3"): [2, 3, 6],
    (): [1, 2, 3, 4, 5, 6],
    ("--base-every", "2"): [1, 2, 3, 4, 5, 6],
    ("--keep", "every:2", "--base-every", "1"): [2, 4, 6],
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("options", KEPT, ids=" ".join)
def test_compact_leaves_the_values_of_remaining_steps(
    options: tuple[str, ...], whole: Path, run: Path, tmp_path: Path
) -> None:
    before = {member.step: member.content for member in chain_file.read(run).members}
    planned = json.loads(ckpt("compact", run, *options, "--dry-run", "--json").out)["steps"]
    done = ckpt("compact", run, *options, "--json")
    assert done.code == 0, done.err
    chain = chain_file.read(run)
    steps = [member.step for member in chain.members]
    assert steps == json.loads(done.out)["steps"] == KEPT[options]
    assert [step["step"] for step in planned if step["becomes"] != "removed"] == steps
    assert {member.step: member.content for member in chain.members} == {step: before[step] for step in steps}
    assert sorted(os.listdir(run)) == sorted(["chain.json", "chain.lock", *(m.folder for m in chain.members)])
    assert ckpt("verify", run).code == 0
    for step in steps:
        out = tmp_path / f"out{step}"
        assert ckpt("restore", run, out, "--step", step).code == 0
        assert contents(open_checkpoint(out)) == contents(open_checkpoint(whole / f"step{step}"))
        assert manifest.load(out / manifest.NAME).content == before[step]
    if "--base-every" in options:
        every = int(options[-1])
        assert [m.kind == "base" for m in chain.members] == [i % every == 0 for i in range(len(steps))]


def test_a_chain_that_was_made_shorter_grows_on(whole: Path, run: Path) -> None:
    ckpt("compact", run, "--keep", "2,4")
    for _ in range(2):
        ckpt("compact", run, "--keep", "last:2")
    step = ckpt("append", run, whole / "step3", "--step", 7)
    assert step.code == 0, step.err
    assert [member.step for member in chain_file.read(run).members] == [4, 6, 7]
    assert contents(open_checkpoint(run)) == contents(open_checkpoint(whole / "step3"))


@pytest.mark.parametrize("policy", ["", "last", "last:0", "every:-1", "some", "1,,2", "99"])
def test_a_policy_that_says_nothing_is_refused(policy: str, run: Path) -> None:
    before = sorted(os.listdir(run))
    assert ckpt("compact", run, "--keep", policy).code in (10, 2)
    assert sorted(os.listdir(run)) == before


def test_save_of_a_state_of_a_chain_reads_each_delta_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `Chain.restore`: the state is replayed first, and the folder for it is gone afterwards."""
    chain, random = library.Chain(tmp_path / "run"), np.random.default_rng(0)
    values = {state: random.standard_normal((300, 1000), np.float32) for state in ("master", "exp_avg")}
    for step in range(3):
        values = {state: value + np.float32(1e-3) for state, value in values.items()}
        chain.append(checkpoint([parameter("w", values)]), step=step)
    nbytes, read_into = Counter[bool](), Reader.read_into

    def counted(self: Reader, path: Path, offset: int, out: memoryview, *more: object) -> None:
        nbytes[path.is_relative_to(tmp_path / "run")] += len(out)
        read_into(self, path, offset, out, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Reader, "read_into", counted)
    monkeypatch.setattr(reader_files, "_MAX_CACHED_BYTES", 1 << 20)  # states are larger than what a reader remembers
    chain.restore(2, tmp_path / "restored.pt")
    once = nbytes[True]
    for name, state in (("whole.pt", chain[2]), ("some.pt", chain[2].select(only="w"))):
        nbytes.clear()
        library.save(state, tmp_path / name)
        assert nbytes[True] <= once
        assert contents(open_checkpoint(tmp_path / name)) == contents(open_checkpoint(tmp_path / "restored.pt"))
    assert sorted(os.listdir(tmp_path)) == ["restored.pt", "run", "some.pt", "whole.pt"]
    with monkeypatch.context() as patch:
        patch.setattr(library.Job, "replay_notice", None)
        nbytes.clear()
        library.save(chain[2], tmp_path / "at once.pt")
        assert nbytes[True] > once
