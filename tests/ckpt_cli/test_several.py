"""Commands that take several checkpoints, or all of a run, and options that choose parts."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ckpt as library
from damage import SAMPLES, ckpt

STEPS = {1: 1.0, 2: 1.0078125, 3: 2.0}
"""The value of the weight by step. The mean of the first two is no bfloat16."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step, value in STEPS.items():
        state = library.from_state_dict({"w": np.full(4, value, ml_dtypes.bfloat16)}, step=step)
        library.save(state, folder / f"step-{step}", library.Universal())
    return folder


def test_verify_goes_on_after_damage_and_counts_it(run: Path, tmp_path: Path) -> None:
    done = ckpt("verify", "--all", run)
    assert (done.code, done.out.splitlines()[-1]) == (0, "ok: all 3 checkpoints")
    flipped = SAMPLES / "damaged" / "flipped-bit"
    done = ckpt("verify", run / "step-1", flipped, run / "step-2")
    assert done.code == 20
    assert done.out.splitlines()[-1] == f"DAMAGED: 1 of 3 checkpoints: {flipped}"
    report = json.loads(ckpt("verify", run / "step-1", flipped, run / "step-2", "--json").out)
    assert [one["ok"] for one in report["checkpoints"]] == [True, False, True]
    assert (report["ok"], report["damaged"]) == (False, [str(flipped)])


def test_verify_all_names_a_damaged_checkpoint_in_a_run(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (pack,) = (tmp_path / "run" / "step-2" / "packs").iterdir()
    content = bytearray(pack.read_bytes())
    content[-1] ^= 1
    pack.write_bytes(content)
    report = json.loads(ckpt("verify", "--all", tmp_path / "run", "--json").out)
    assert [Path(path).name for path in report["damaged"]] == ["step-2"]


def test_average_takes_the_newest_of_a_run(run: Path, tmp_path: Path) -> None:
    assert ckpt("average", run, tmp_path / "two.safetensors", "--last", "2").code == 0
    wanted = ckpt("average", run / "step-2", run / "step-3", tmp_path / "same.safetensors")
    assert wanted.code == 0
    two, same = (library.open(tmp_path / f"{name}.safetensors")["w"] for name in ("two", "same"))
    assert np.asarray(two).tobytes() == np.asarray(same).tobytes()
    assert ckpt("average", run, tmp_path / "x", "--last", "4").code == 10
    assert ckpt("average", run / "step-1", run / "step-2", run / "step-3", tmp_path / "x", "--last", "2").code == 2


def test_a_wider_type_of_an_average_is_not_rounded_before(run: Path, tmp_path: Path) -> None:
    steps = (run / "step-1", run / "step-2")
    for dtype, name in (("fp32", "float32"), ("fp16", "float16")):
        assert ckpt("average", *steps, tmp_path / f"{name}.safetensors", "--dtype", dtype).code == 0
        assert library.open(tmp_path / f"{name}.safetensors")["w"].dtype == name
    mean = np.asarray(library.open(tmp_path / "float32.safetensors")["w"])
    assert mean.tolist() == [(STEPS[1] + STEPS[2]) / 2] * 4


def test_append_takes_several_states(run: Path, tmp_path: Path) -> None:
    chain = tmp_path / "run.chain"
    done = ckpt("append", chain, *(run / f"step-{step}" for step in STEPS), "--json")
    assert (done.code, [one["step"] for one in json.loads(done.out)["appended"]]) == (0, list(STEPS))
    for step, value in STEPS.items():
        assert np.asarray(library.open(f"{chain}@{step}")["w"]).astype(float).tolist() == [value] * 4
    wrong = ckpt("append", chain, run / "step-1", run / "step-2", "--step", "7")
    assert (wrong.code, "one by one" in wrong.err) == (2, True)


def test_compress_takes_a_part(tmp_path: Path) -> None:
    source = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
    assert ckpt("compress", source, tmp_path / "part", "--model-only", "--only", "head").code == 0
    part, run = library.open(tmp_path / "part"), library.open(source)
    assert {(name, *one.states) for name, one in part.items()} == {("head.weight", "model")}
    assert np.asarray(part["head.weight"]).tobytes() == np.asarray(run["head.weight"]).tobytes()
