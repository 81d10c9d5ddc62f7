"""A chain across formats: its base from ZeRO-1, its deltas from ZeRO-3 at another degree of the same run, by DeepSpeed.

What is restored as DCP is held against the files that the engine saved, and what is restored for DeepSpeed is loaded
by it, at a third stage and degree.
"""

import json
from pathlib import Path

import pytest

from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file
from damage import ckpt
from engines import launch
from held import contents

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

KIND = "z1_bf16_dp2"


def resumed(tmp_path: Path, checkpoint: Path, tag: str, out: Path, saves: int, **changes: int) -> list[Path]:
    """Let the engine load a checkpoint, train on and save; the folders of the steps, in order."""
    job = {
        "checkpoint": checkpoint,
        "tag": tag,
        "kind": KIND,
        "changes": changes,
        "steps": 1,
        "saves": saves,
        "out": out,
    }
    job_file = tmp_path / f"{out.name}.job"
    job_file.write_text(json.dumps(job, default=str))
    launch.run_script(launch.HERE / "train_on.py", [str(job_file)], 1)
    folders = out.glob("global_step*")
    return sorted(folders, key=lambda path: int(path.name.removeprefix("global_step")))


def test_a_run_that_changed_its_stage_and_degree(tmp_path: Path) -> None:
    launch.train([KIND], tmp_path)
    first = next((tmp_path / KIND / "ckpt").glob("global_step*"))
    cut = tmp_path / "cut"
    assert ckpt("reshard", first, cut, "--zero", 3, "--dp", 3).code == 0
    later = resumed(tmp_path, cut, (cut / "latest").read_text(), tmp_path / "zero3", 2, stage=3, dp=3)
    assert len(later) == 2
    run = tmp_path / "run"
    for path in (first, *later):
        done = ckpt("append", run, path)
        assert done.code == 0, done.err
    assert [member.kind for member in chain_file.read(run).members] == ["base", "delta", "delta"]
    for path, member in zip((first, *later), chain_file.read(run).members, strict=True):
        out = tmp_path / f"dcp{member.step}"
        done = ckpt("restore", run, out, "--step", member.step, "--to", "dcp")
        assert done.code == 0, done.err
        assert detect(out).name == "dcp"
        assert contents(open_checkpoint(out)) == contents(open_checkpoint(path))
    back = tmp_path / "back"
    assert ckpt("restore", run, back, "--to", "deepspeed", "--zero", 2, "--dp", 1).code == 0
    (again,) = resumed(tmp_path, back, (back / "latest").read_text(), tmp_path / "again", 1, stage=2, dp=1)
    assert open_checkpoint(again).origin.step == chain_file.read(run).members[-1].step + 1
