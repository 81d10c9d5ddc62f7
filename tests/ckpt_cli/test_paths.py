"""Paths: the folder of a run, states of chains, and a pipe."""

import json
import shutil
from pathlib import Path

import pytest

from damage import SAMPLES, ckpt

ZERO1, CHAIN = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", SAMPLES / "universal-1-delta"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints of several kinds; two of them are not whole."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    for name in ("step-9", "step-10"):
        assert ckpt("convert", ZERO1, folder / name).code == 0
    shutil.copytree(SAMPLES / "damaged" / "missing-rank", folder / "step-7")
    shutil.copytree(SAMPLES / "damaged" / "truncated-shard", folder / "step-8")
    assert ckpt("convert", ZERO1, folder / "step-11.ucp").code == 0
    return folder


def test_inspect_lists_all_checkpoints_of_a_run(run: Path) -> None:
    done = ckpt("inspect", run)
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines() if line.startswith("step-")]
    assert [row[0] for row in rows] == ["step-7", "step-8", "step-9", "step-10", "step-11.ucp"]
    assert [row[-1] == "complete" for row in rows] == [False, False, True, True, True]
    assert rows[3][1:] == ["5", "419.4", "KiB", "universal", "34,056", "complete"]
    assert "give commands the path of one checkpoint" in done.out
    report = json.loads(ckpt("inspect", run, "--json").out)
    assert [one["whole"] for one in report["checkpoints"]] == [False, False, True, True, True]
    assert "is missing" in report["checkpoints"][0]["problem"]
    assert report["default"] is None


def test_folder_of_a_run_means_what_latest_names(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "latest").write_text("step-9\n")
    assert json.loads(ckpt("inspect", folder, "--json").out)["default"] == "step-9"
    done = ckpt("verify", folder)
    assert done.code == 0
    assert "of 5 checkpoints here, step-9 is read, because `latest` names it" in done.err


def test_error_names_the_checkpoints_of_a_run_when_there_is_no_pointer(run: Path, tmp_path: Path) -> None:
    done = ckpt("convert", run, tmp_path / "out")
    assert done.code == 10
    assert "holds 5 checkpoints: step-7, step-8, step-9, step-10, step-11.ucp" in done.err
    assert "`ckpt inspect` lists them all" in done.err


def test_the_only_checkpoint_of_a_folder_is_meant(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert ckpt("convert", ZERO1, tmp_path / "run" / "a.ucp").code == 0
    done = ckpt("inspect", tmp_path / "run")
    assert (done.code, "a.ucp is read, the only checkpoint in the folder" in done.err) == (0, True)


@pytest.mark.parametrize(
    ("address", "step"), [("@12", 12), ("@last", 16), ("@last~4", 12), ("", 16)], ids=lambda value: str(value)
)
def test_every_command_that_reads_takes_a_state_of_a_chain(address: str, step: int, tmp_path: Path) -> None:
    state = f"{CHAIN}{address}"
    assert json.loads(ckpt("inspect", state, "--json").out)["origin"]["step"] == step
    for i, arguments in enumerate(
        (
            ("verify", state),
            ("rules", state),
            ("diff", state, f"{CHAIN}@{step}"),
            ("convert", state, tmp_path / "a.safetensors"),
            ("compress", state, tmp_path / "b"),
            ("restore", state, tmp_path / "c"),
            ("append", tmp_path / "new.chain", state),
            ("average", state, f"{CHAIN}@{step}", tmp_path / "d"),
        )
    ):
        done = ckpt(*arguments)
        assert done.code == 0, (i, done.err)


READERS = {
    "inspect": ["-"],
    "verify": ["-"],
    "rules": ["-"],
    "log": ["-"],
    "diff": ["-", "a"],
    "convert": ["-", "a"],
    "reshard": ["a", "-"],
    "compress": ["-", "a"],
    "decompress": ["a", "-"],
    "append": ["a", "-"],
    "restore": ["-", "a"],
    "compact": ["-"],
    "average": ["-", "a", "b"],
    "merge": ["a", "-", "b", "--method", "linear"],
    "merge-lora": ["a", "-", "b"],
}


@pytest.mark.parametrize("command", READERS)
def test_a_pipe_is_refused_with_the_reason(command: str) -> None:
    done = ckpt(command, *READERS[command])
    assert done.code == 2
    assert "a pipe cannot be used" in done.err


def test_verify_quick_reads_no_tensor(run: Path, tmp_path: Path) -> None:
    flipped = SAMPLES / "damaged" / "flipped-bit"
    assert ckpt("verify", flipped).code == 20
    done = ckpt("verify", "--quick", flipped)
    assert (done.code, "no tensor was read" in done.out) == (0, True)
    assert ckpt("verify", "--quick", run / "step-8").code == 20
    report = json.loads(ckpt("verify", "--quick", CHAIN, "--json").out)
    assert (report["ok"], report["quick"]) == (True, True)
    assert ckpt("verify", "--quick", "--replay", CHAIN).code == 2


def test_files_that_are_checkpoints_of_their_own_are_listed(tmp_path: Path) -> None:
    for name in ("epoch-9.ckpt", "epoch-10.ckpt"):
        assert ckpt("convert", ZERO1, tmp_path / name).code == 0
    report = json.loads(ckpt("inspect", tmp_path, "--json").out)
    assert [(one["name"], one["whole"]) for one in report["checkpoints"]] == [
        ("epoch-9.ckpt", True),
        ("epoch-10.ckpt", True),
    ]
    assert ckpt("verify", tmp_path).code == 10


def test_inspect_shows_the_step_that_a_chain_has_of_a_checkpoint_without_one(tmp_path: Path) -> None:
    weights, chain = SAMPLES / "transformers-5.23-trainer" / "model.safetensors", tmp_path / "run.chain"
    for step in (7, 9):
        assert ckpt("append", chain, weights, "--step", step).code == 0
    for path, shown in (
        (chain, "9 in the chain"),
        (f"{chain}@7", "7 in the chain"),
        (f"{chain}@last~2", "7 in the chain"),
    ):
        assert f"step        {shown}" in ckpt("inspect", path).out
    assert json.loads(ckpt("inspect", chain, "--json").out)["origin"]["step"] is None
    assert ckpt("diff", f"{chain}@7", weights).code == 0, "the state is the checkpoint, which states no step"
