"""`ckpt diff --table`: several checkpoints against the first, as text, CSV and JSON."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt as library
from damage import SAMPLES, ckpt

ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
CHAIN = SAMPLES / "universal-1-delta"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two layers. The third has a NaN, the first an infinite value."""
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2, 3):
        a = np.full(1000, 1.0, np.float32)
        a[:step] = 1.5 * step
        b = np.full(1000, 2.0, np.float32)
        b[0] = np.inf
        if step == 3:
            a[10] = np.nan
        weights = {"layers.0.w": a, "layers.1.w": b}
        library.save(library.from_state_dict(weights, step=step), folder / f"step-{step}.ucp")
    return folder


def table(*arguments: Any) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(ckpt("diff", *arguments, "--json").out)
    return report


def test_rows_are_those_of_each_pair_alone() -> None:
    """Also of a baseline in another format, with masters, and with names that only some of them have."""
    chain = [library.open(f"{CHAIN}@{step}") for step in (10, 11, 12, 13)]
    assert library.diff_each(chain[0], chain[1:]) == [library.diff(chain[0], other) for other in chain[1:]]
    flipped = SAMPLES / "damaged" / "flipped-bit"
    for baseline, *others in ((ZERO1, flipped, f"{CHAIN}@10"), (f"{CHAIN}@10", f"{CHAIN}@12", ZERO1)):
        rows = table(baseline, *others, "--by", "layer")["checkpoints"]
        for row, other in zip(rows, others, strict=True):
            alone = json.loads(ckpt("diff", baseline, other, "--by", "layer", "--json").out)
            assert (row["total"], row["values"], row["groups"]) == (alone["total"], alone["values"], alone["groups"])
            kinds = [pair["kind"] for pair in alone["tensors"]]
            assert [row[kind] for kind in ("missing", "added", "reshaped")] == [
                kinds.count(kind) for kind in ("missing", "added", "reshaped")
            ]


def test_table_names_checkpoints_that_cannot_be_read_and_compares_the_others(run: Path) -> None:
    first, last = (run / f"step-{step}.ucp" for step in (1, 3))
    missing, cut, rank = (
        run / "step-9.ucp",
        *(SAMPLES / "damaged" / name for name in ("truncated-shard", "missing-rank")),
    )
    alone = table(first, last)
    for broken, code in (([missing, cut], 10), ([rank, missing], 20)):
        done = ckpt("diff", first, broken[0], last, broken[1])
        assert done.code == code
        assert "different: 1 of 1" in done.out
        for one in broken:
            assert f"NOT COMPARED: {one}" in done.err
        report = table(first, broken[0], last, broken[1])
        assert [one["path"] for one in report["unread"]] == list(map(str, broken))
        assert all(one["what"] for one in report["unread"])
        assert report["checkpoints"][0]["total"]["changed"] == alone["total"]["changed"]
    assert ckpt("diff", missing, first, last).code == ckpt("diff", first, missing, missing).code == 10
    assert "nothing at this path" in ckpt("diff", first, missing).err


def test_table_names_checkpoints_whose_values_are_damaged_and_compares_the_others(run: Path, tmp_path: Path) -> None:
    first, last = (run / f"step-{step}.ucp" for step in (1, 3))
    damaged = tmp_path / "damaged.ucp"
    weights = {f"layers.{layer}.w": np.random.default_rng(layer).random(1000, np.float32) for layer in range(2)}
    library.save(library.from_state_dict(weights), tmp_path / "whole.ucp")
    assert not ckpt("compress", tmp_path / "whole.ucp", damaged).code
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    done = ckpt("diff", first, damaged, last)
    assert (done.code, "different: 1 of 1" in done.out, f"NOT COMPARED: {damaged}" in done.err) == (20, True, True)
    assert [one["path"] for one in table(first, damaged, last)["unread"]] == [str(damaged)]
    for alone in ((first, damaged), (first, damaged, run / "step-9.ucp"), (damaged, first, last)):
        done = ckpt("diff", *alone, "--table")
        assert (done.code, "NOT COMPARED" in done.err, "checksum" in done.err) == (20, False, True)


@pytest.mark.slow
def test_table_compares_what_is_selected_of_an_incomplete_checkpoint(tmp_path: Path) -> None:
    whole, cut = SAMPLES / "dcp-2.13-fsdp2-w2", tmp_path / "cut"
    shutil.copytree(whole, cut)
    data = (cut / "__1_0.distcp").read_bytes()
    (cut / "__1_0.distcp").write_bytes(data[:-5000])
    assert ckpt("diff", whole, cut, "--table", "--only", "drift", "--tensors-only").code == 0
    assert ckpt("diff", whole, cut, whole, "--only", "drift", "--tensors-only").code == 0
    assert ckpt("diff", whole, cut, whole).code == 20


@pytest.mark.slow
def test_table_names_checkpoints_that_cannot_have_the_names_of_others(run: Path) -> None:
    model = SAMPLES / "transformers-5.23-trainer"
    done = ckpt("diff", model, run / "step-1.ucp", model, "--names", "megatron")
    assert (done.code, "the same: 1 checkpoint" in done.out) == (22, True)
    assert f"NOT COMPARED: {run / 'step-1.ucp'}" in done.err
    assert ckpt("diff", model, run / "step-1.ucp", "--names", "megatron").code == 22


def test_the_baseline_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": np.arange(1 << 18, dtype=np.float32)}
    for name in "abcd":
        library.save(library.from_state_dict(weights), tmp_path / f"{name}.safetensors")
    nbytes: dict[str, int] = {}
    read = os.preadv

    def counting(file: int, buffers: Any, offset: int) -> int:
        count = read(file, buffers, offset)
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        nbytes[name] = nbytes.get(name, 0) + count
        return count

    opened = [library.open(tmp_path / f"{name}.safetensors") for name in "abcd"]
    monkeypatch.setattr(os, "preadv", counting)
    assert all(one.same for one in library.diff_each(opened[0], opened[1:]))
    assert nbytes == {f"{name}.safetensors": 1 << 20 for name in "abcd"}


def test_a_table_names_the_first_checkpoint_with_nan(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    steps = [f"step-{step}.ucp" for step in (1, 2, 3)]
    done = ckpt("diff", *steps, "--by", "layer")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0] == "against step-1.ucp, step 1: 2,000 elements"
    assert [line.split()[0] for line in lines[2:4]] == steps[1:]
    assert lines[-1] == "different: 2 of 2 from step-1.ucp; the first with NaN or infinity is step-2.ucp"
    rows = table(*steps)["checkpoints"]
    counts = [(row["total"]["first_not_finite"], row["total"]["second_not_finite"]) for row in rows]
    assert counts == [(1, 1), (1, 2)]
    assert [row["total"]["changed"] for row in rows] == [2, 4]
    assert [row["total"]["max"] for row in rows] == [None, None]
    (skipped,) = table(*steps[:2], "--table", "--skip", "layers.1")["checkpoints"]
    assert (skipped["total"]["max"], skipped["total"]["changed"]) == (2.0, 2)
    pivot = ckpt("diff", *steps, "--by", "layer", "--sort", "max", "--skip", "layers.1").out.splitlines()
    head = pivot.index("max by layer")
    assert pivot[head + 1].split() == ["layer", "step", "2", "step", "3"]
    assert pivot[head + 2].split() == ["layers.0", "2", "1", "not", "finite"]


def test_csv_has_what_json_has(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    steps = [f"step-{step}.ucp" for step in (1, 2, 3)]
    for by in ((), ("tensor", "state")):
        options = [word for how in by for word in ("--by", how)]
        target = tmp_path / "table.csv"  # the second one takes the place of the first
        assert ckpt("diff", *steps, *options, "--csv", target).code == 1
        with target.open(newline="") as file:
            rows = list(csv.DictReader(file))
        wanted = []
        for row in table(*steps, *options)["checkpoints"]:
            for group in row["groups"] if by else [row["total"]]:
                del group["histogram"], group["not_finite"]
                wanted.append({"checkpoint": row["path"], "step": row["step"], **group})
        assert rows == [{key: "" if value is None else str(value) for key, value in row.items()} for row in wanted]
        assert ckpt("diff", *steps, *options, "--csv", "-").out == target.read_text()


def test_wrong_tables_are_refused_before_anything_is_read(run: Path, tmp_path: Path) -> None:
    steps = [run / f"step-{step}.ucp" for step in (1, 2, 3)]
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    for options, code in (
        (("--html", tmp_path / "x.html"), 2),
        (("-o", tmp_path / "delta"), 2),
        (("--csv", "-", "--json"), 2),
        (("--csv", tmp_path / "mine.csv"), 30),
        (("--csv", tmp_path / "gone" / "x.csv"), 30),
    ):
        done = ckpt("diff", *steps, *options)
        assert (done.code, "error: " in done.err) == (code, True), options
    assert ckpt("diff", steps[0]).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]
    same = ckpt("diff", steps[0], steps[0], steps[0], "--tensors-only")
    assert (same.code, same.out.splitlines()[-1][:8]) == (0, "the same")


def test_a_chain_or_a_run_alone_is_compared_with_its_first_state(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step in (1, 2, 3):
        state = library.from_state_dict({"w": np.full(4, step, np.float32)}, step=step)
        library.save(state, tmp_path / "run" / f"step-{step}", library.Universal())
    report = table(tmp_path / "run")
    assert (Path(report["first"]).name, [one["step"] for one in report["checkpoints"]]) == ("step-1", [2, 3])
    assert ckpt("diff", tmp_path / "run" / "step-1").code == 2
    report = table(CHAIN, "--table", "--state", "exp_avg")
    assert [one["step"] for one in report["checkpoints"]] == list(range(11, 17))
    assert report["step"] == 10
