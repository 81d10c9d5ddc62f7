"""Several checkpoints in a folder: all are shown, and no command takes one of them without saying so."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpt_formats.registry.opening import open_checkpoint
from damage import BROKEN, NOT_FOUND, SAMPLES, ckpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.arange(2.0)}


def model(folder: Path, value: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((3,), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "new"}')


@pytest.mark.parametrize("stray", ["m.safetensors", "m.pt"])
def test_open_takes_no_stray_file_beside_checkpoints(stray: str, tmp_path: Path) -> None:
    for name in "ab":
        model(tmp_path / "run" / name, 1.0)
    if stray.endswith(".pt"):
        torch.save(WEIGHTS, tmp_path / "run" / stray)
    else:
        save_file(WEIGHTS, tmp_path / "run" / stray)
    done = ckpt("convert", tmp_path / "run", tmp_path / "out")
    assert done.code == NOT_FOUND
    assert f"holds the file {stray} and 2 checkpoints: a, b" in done.err
    listed = json.loads(ckpt("inspect", tmp_path / "run", "--json").out)
    assert [one["name"] for one in listed["checkpoints"]] == [stray, "a", "b"]
    assert listed["default"] is None
    assert ckpt("verify", tmp_path / "run" / stray).code == 0


def test_steps_without_a_pointer_and_a_file_beside_them_are_all_listed(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2" / "global_step5", tmp_path / "global_step5")
    shutil.copytree(tmp_path / "global_step5", tmp_path / "global_step6")
    save_file(WEIGHTS, tmp_path / "m.safetensors")
    shown = ckpt("inspect", tmp_path)
    assert shown.code == 0, shown.err
    names = [line.split()[0] for line in shown.out.splitlines() if line.startswith(("m.", "global_"))]
    assert names == ["m.safetensors", "global_step5", "global_step6"]
    assert "give commands the path of one checkpoint" in shown.out


def test_the_final_model_of_a_trainer_is_read_and_its_checkpoints_are_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model(run, 3.0)
    for step in (10, 20):
        model(run / f"checkpoint-{step}", float(step))
    notices = open_checkpoint(run).notices
    assert any("the model in the folder itself is read" in one and "checkpoint-20/" in one for one in notices)
    listed = json.loads(ckpt("inspect", run, "--json").out)
    assert [one["name"] for one in listed["checkpoints"]] == ["run", "checkpoint-10", "checkpoint-20"]
    assert listed["default"] == "run"
    assert "means the model in the folder itself" in ckpt("inspect", run).out


def test_a_step_of_dcp_without_a_file_does_not_count_as_complete(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        dcp.save({"model": {"w": torch.full((3,), float(step))}}, checkpoint_id=tmp_path / f"step-{step}")
    (tmp_path / "step-15" / ".metadata").unlink()
    (tmp_path / "step-10" / "__0_0.distcp").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.step == 5
    assert checkpoint["w"].weight[:].tolist() == [5.0] * 3
    text = "\n".join(map(str, checkpoint.notices))
    assert "newer, but not complete: step-10" in text
    assert "newer, but the save was broken off: step-15" in text
    listed = json.loads(ckpt("inspect", tmp_path, "--json").out)
    assert [one["whole"] for one in listed["checkpoints"]] == [True, False, False]
    assert (listed["newest_whole"], listed["default"]) == ("step-5", "step-5")
    shutil.rmtree(tmp_path / "step-5")
    done = ckpt("verify", tmp_path)
    assert (done.code, "__0_0.distcp is missing" in done.err) == (BROKEN, True)


def test_error_of_a_broken_newest_step_names_the_newest_whole_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        model(run / f"step-{step}", float(step))
    for step in (2, 3):
        (run / f"step-{step}" / "model.safetensors").write_bytes(b"")
    (run / "latest").write_text("step-3")
    done = ckpt("convert", run, tmp_path / "out")
    assert done.code == BROKEN
    assert f"The newest complete checkpoint is step-1: name {run / 'step-1'}" in done.err
    shown = ckpt("inspect", run)
    rows = {line.split()[0]: line for line in shown.out.splitlines() if line.startswith("step-")}
    assert " latest " in rows["step-3"]
    assert " newest complete " in rows["step-1"]
    assert "names step-3, which is incomplete" in shown.out
    listed = json.loads(ckpt("inspect", run, "--json").out)
    assert (listed["latest"], listed["newest_whole"], listed["default"]) == ("step-3", "step-1", None)
    shutil.rmtree(run / "step-1")
    assert "newest whole" not in ckpt("convert", run, tmp_path / "out").err
