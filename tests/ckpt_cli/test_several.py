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
    done = ckpt("verify", "gone", run / "step-1")
    assert (done.code, done.out.splitlines()[-1]) == (10, "NOT VERIFIED: 1 of 2 checkpoints: gone")
    assert "error: there is nothing at this path" in done.err
    report = json.loads(ckpt("verify", "gone", flipped, "--json").out)
    assert [one["ok"] for one in report["checkpoints"]] == [False, False]
    assert ckpt("verify", "gone", flipped).code == 20


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


@pytest.mark.parametrize("ending", [".ucp", ".pt"])
def test_verify_of_a_part_finds_damage_there_and_says_what_it_leaves_out(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"two{ending}"
    weights = {"a": np.full(4000, 1.5, np.float32), "b": np.full(4000, 2.5, np.float32)}
    library.save(library.from_state_dict(weights), path)
    content = bytearray(path.read_bytes())
    content[content.rindex(np.float32(2.5).tobytes())] ^= 1
    path.write_bytes(content)
    assert ckpt("verify", path).code == ckpt("verify", path, "--only", "^b$").code == 20
    whole_part = ckpt("verify", path, "--only", "^a$")
    assert (whole_part.code, "not checked: 1 of 2 parameters" in whole_part.out) == (0, True)
    report = json.loads(ckpt("verify", path, "--skip", "b", "--json").out)
    assert (report["ok"], report["left_out"], report["parameters"], report["checksums"]) == (True, 1, 1, 1)
    assert [one["names"] for one in report["notes"]] == [["b"]]
    assert not library.verify(library.open(path), skip="b")
    assert library.verify(library.open(path), only="b")
    quick = ckpt("verify", path, "--quick", "--only", "^a$")
    assert (quick.code, "not checked: 1 of 2 parameters" in quick.out) == (0, True)


def test_verify_of_a_chain_takes_no_part() -> None:
    done = ckpt("verify", SAMPLES / "universal-1-delta", "--only", "trained")
    assert (done.code, "CHAIN@STEP --only PATTERN" in done.err) == (2, True)
    assert ckpt("verify", SAMPLES / "universal-1-delta", "--replay", "--skip", "trained").code == 2
    state = ckpt("verify", f"{SAMPLES / 'universal-1-delta'}@12", "--only", "table")
    assert (state.code, "not checked: " in state.out) == (0, True)


def test_rules_show_a_part() -> None:
    source = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
    shown = json.loads(ckpt("rules", source, "--only", "head", "--json").out)
    assert [one["name"] for one in shown["parameters"]] == ["head.weight"]
    assert "leave out" in shown["notes"][-1]["text"]


def test_inspect_lists_several_and_goes_on_after_errors(run: Path, tmp_path: Path) -> None:
    zero, cut = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", SAMPLES / "damaged" / "truncated-shard"
    chain = f"{SAMPLES / 'universal-1-delta'}@11"
    library.save(library.open(run / "step-1"), tmp_path / "one.safetensors")
    paths = (zero, cut, chain, "gone", run, tmp_path / "one.safetensors")
    done = ckpt("inspect", *paths, "--json")
    report = json.loads(done.out)
    rows = report["checkpoints"]
    assert (done.code, report["kind"], report["path"], report["parameters"]) == (20, "several", None, None)
    assert [row["name"] for row in rows] == [
        *map(str, paths[:4]),
        *(f"{run}/step-{step}" for step in STEPS),
        str(paths[5]),
    ]
    assert [row["whole"] for row in rows] == [True, False, True, False, True, True, True, True]
    kinds = ["folder", None, "chain", None, "folder", "folder", "folder", "file"]
    assert [row["kind"] for row in rows] == kinds
    assert [row["step"] for row in rows] == [5, None, 11, None, 1, 2, 3, None]
    assert rows[0] | {"nbytes": 0} == {
        "name": str(zero),
        "path": str(zero),
        "kind": "folder",
        "format": "deepspeed",
        "engine": "deepspeed",
        "step": 5,
        "ranks": 2,
        "tensors": sum(one.role in ("parameter", "frozen") for one in library.open(zero).values()),
        "elements": sum(one.weight.size for one in library.open(zero).values() if one.role in ("parameter", "frozen")),
        "nbytes": 0,
        "whole": True,
        "problem": None,
    }
    assert rows[0]["nbytes"] == sum(file.stat().st_size for file in (zero / "global_step5").iterdir())
    text = ckpt("inspect", *paths)
    assert text.out.count("\n") == 1 + len(rows)
    assert (text.code, text.err.count("error: ")) == (20, 2)
    (tmp_path / "runs").mkdir()
    shutil.copytree(run, tmp_path / "runs" / "two")
    shutil.copytree(cut, tmp_path / "runs" / "cut")
    shutil.copy(tmp_path / "one.safetensors", tmp_path / "runs" / "two")
    shown = ckpt("inspect", tmp_path / "runs").out
    assert " cannot be opened: holds" in shown  # nothing in it is incomplete
    assert " incomplete: " in shown
    assert ckpt("inspect", "gone", cut).code == 10


def test_inspect_has_one_shape_for_whatever_it_inspects(run: Path, tmp_path: Path) -> None:
    library.save(library.open(run / "step-1"), tmp_path / "one.pt")
    places = {
        "folder": SAMPLES / "dcp-2.13-fsdp2-w2",
        "file": tmp_path / "one.pt",
        "chain": SAMPLES / "universal-1-delta",
        "log": SAMPLES / "recorded-1" / "run.chain",
        "run": run,
        "damaged run": SAMPLES / "damaged",
        "several": run / "step-1",
    }
    shapes = {}
    for name, place in places.items():
        report = json.loads(ckpt("inspect", place, *([place] if name == "several" else []), "--json").out)
        shapes[name] = (report.keys(), {tuple(row) for row in report["checkpoints"]})
        is_one = name not in ("run", "damaged run", "several")
        assert (report["kind"] == "checkpoint") is is_one
        assert all((report[key] is not None) is is_one for key in ("format", "origin", "parameters", "files"))
    assert all(shape == shapes["folder"] for shape in shapes.values())


def test_inspect_shows_a_part(run: Path) -> None:
    source = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
    report = json.loads(ckpt("inspect", source, "--only", "head", "--json").out)
    assert [one["name"] for one in report["parameters"] if one["role"] != "extra"] == ["head.weight"]
    assert "leave out" in " ".join(one["text"] for one in report["notes"])
    rows = json.loads(ckpt("inspect", source, source, "--only", "head", "--json").out)["checkpoints"]
    assert [row["tensors"] for row in rows] == [1, 1]
    assert ckpt("inspect", run, "--only", "w").code == 2
