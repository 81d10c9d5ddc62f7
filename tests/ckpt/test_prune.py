"""Checkpoints of a run are removed by rules, never the last whole one, and nothing else is touched."""

import json
import os
import random
import shutil
import time
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import numpy as np
import obstore
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt.pipeline.removal import finish_removals, remove_checkpoint
from ckpt.types import PruneResult
from ckpt_cli.main import USAGE
from ckpt_formats.stores.bucket_place import BucketPlace
from ckpt_formats.stores.location import source_path
from damage import BROKEN, NOT_FOUND, SAMPLES
from damage import ckpt as command
from killing import killed, points
from object_stores import StoreServer
from prune_kills import folder_round, make_run

DAY = 86_400
NOON = 1_700_049_600 - 1_700_049_600 % DAY + DAY // 2


def model(folder: Path, value: float, saved: float = NOON, **state: object) -> None:
    folder.mkdir(parents=True)
    save_file({"w": np.full(3, value, np.float32)}, folder / "model.safetensors")
    if state:
        (folder / "trainer_state.json").write_text(json.dumps(state))
    for path in (*folder.iterdir(), folder):
        os.utime(path, (saved, saved))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twelve steps, three on each of four days; the newest is incomplete, and so is one in between."""
    for number in range(12):
        model(tmp_path / f"checkpoint-{number * 10}", number, NOON + number // 3 * DAY + number)
    for number in (11, 4):
        os.truncate(path := tmp_path / f"checkpoint-{number * 10}" / "model.safetensors", 10)
        os.utime(path, (NOON, NOON))
    (tmp_path / "latest").write_text("checkpoint-50")
    (tmp_path / "link").symlink_to("checkpoint-60")
    model(tmp_path / "base", 7.0)
    model(tmp_path / "Llama-3", 8.0)
    (tmp_path / "checkpoint-400").write_text("a file of this name")
    return tmp_path


def names(rows: object) -> list[str]:
    return [one.path.name for one in rows]  # type: ignore[attr-defined]


def numbers(result: PruneResult) -> list[int]:
    return [one.step for one in result.retained if one.step is not None]


def test_prune_keeps_what_rules_and_pointers_name_and_removes_the_rest(run: Path) -> None:
    before = sorted(path.name for path in run.iterdir())
    planned = ckpt.runs.prune(run, "last:2,every:40", dry_run=True)
    assert sorted(path.name for path in run.iterdir()) == before
    result = ckpt.runs.prune(run, "last:2,every:40")
    assert names(result.removed) == names(planned.removed) == [f"checkpoint-{n}" for n in (70, 30, 20, 10)]
    reasons = {one.path.name: one.reason for one in result.retained}
    assert reasons == {
        "checkpoint-100": "last:2",
        "checkpoint-90": "last:2",
        "checkpoint-80": "every:40",
        "checkpoint-60": "a file or a link names it",
        "checkpoint-50": "a file or a link names it",
        "checkpoint-0": "every:40",
    }
    assert names(result.incomplete) == ["checkpoint-110", "checkpoint-40"]
    assert sorted(path.name for path in run.iterdir()) == sorted(set(before) - set(names(result.removed)))
    again = ckpt.runs.prune(run, "last:2,every:40", incomplete=True)
    assert names(again.removed) == ["checkpoint-40"]
    assert names(again.incomplete) == ["checkpoint-110"]  # it may be the one that is being written


@pytest.mark.parametrize(
    ("rules", "steps"),
    [
        ("daily:2", [100, 80]),
        ("daily:9", [100, 80, 50, 20]),
        ("weekly:2", [100]),
        ("monthly:3,hourly:1", [100]),
        ("yearly:1,every:30", [100, 90, 60, 30, 0]),
        ("last:1", [100]),
    ],
)
def test_rules_of_times_keep_the_newest_of_each_period(rules: str, steps: list[int], run: Path) -> None:
    (run / "latest").unlink()
    (run / "link").unlink()
    assert numbers(ckpt.runs.prune(run, rules, dry_run=True)) == steps


def test_the_best_is_that_of_the_newest_state_of_a_trainer(tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 1), (3, 2), (4, 2)):
        model(tmp_path / f"checkpoint-{step}", step, global_step=step, best_model_checkpoint=f"out/checkpoint-{best}")
    assert numbers(ckpt.runs.prune(tmp_path, "best", dry_run=True)) == [4, 2]


def test_prune_removes_nothing_until_a_newer_one_is_whole_and_unchanged(tmp_path: Path) -> None:
    model(tmp_path / "step-1", 1)
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "step-1" / "model.safetensors")  # written just now
    with pytest.raises(ckpt.errors.IncompleteError, match="unchanged for long enough"):
        ckpt.runs.prune(tmp_path, "last:1")
    model(tmp_path / "step-0", 0)
    model(tmp_path / "step--1", 0)
    model(tmp_path / "step-2", 2)
    (tmp_path / "step-2" / "model.safetensors").write_bytes(b"")
    result = ckpt.runs.prune(tmp_path, "last:1")
    assert {one.path.name: one.reason for one in result.retained} == {
        "step-1": "newer than the newest complete one",
        "step-0": "last:1",
    }
    assert result.removed == ()
    assert names(ckpt.runs.prune(tmp_path, "last:1", unchanged_for=0).removed) == ["step-0"]


def test_prune_leaves_an_old_checkpoint_that_changed_a_moment_ago(tmp_path: Path) -> None:
    for step in (1, 2):
        model(tmp_path / f"step-{step}", step)
    os.utime(tmp_path / "step-1" / "model.safetensors")  # a job that resumed from it writes it again
    assert [one.reason for one in ckpt.runs.prune(tmp_path, "last:1").retained] == ["last:1", "changed a moment ago"]


def test_prune_leaves_a_checkpoint_that_is_written_while_others_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        model(tmp_path / f"checkpoint-{step}", step)

    def remove(path: Path) -> None:
        save_file({"w": np.zeros(3, np.float32)}, tmp_path / "checkpoint-2" / "model.safetensors")
        remove_checkpoint(path)

    monkeypatch.setattr(import_module("ckpt.runs.prune"), "remove_checkpoint", remove)
    result = ckpt.runs.prune(tmp_path, "last:1")
    assert (numbers(result), names(result.removed)) == ([3, 2], ["checkpoint-1"])
    assert result.retained[1].reason == "changed a moment ago"
    assert (tmp_path / "checkpoint-2").is_dir()


def test_prune_keeps_a_checkpoint_from_which_a_kept_one_reads(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        model(tmp_path / f"step-{step}", step)
    for step, other in ((3, 1), (1, 2)):
        (file := tmp_path / f"step-{step}" / "model.safetensors").unlink()
        file.symlink_to(f"../step-{other}/model.safetensors")
    result = ckpt.runs.prune(tmp_path, "last:1", dry_run=True)
    assert [(one.step, one.reason) for one in result.retained[1:]] == [
        (2, "another one that stays reads from it"),
        (1, "another one that stays reads from it"),
    ]


def test_prune_keeps_the_parents_of_a_delta_that_stays(tmp_path: Path, server: StoreServer, user: object) -> None:
    values, run = np.arange(1 << 12, dtype=np.float32), tmp_path / "run"
    run.mkdir()
    for step in range(4):
        save_file({"w": values + (values % 50 < step)}, whole := tmp_path / "whole.safetensors")
        if step < 2:
            ckpt.save(ckpt.open(whole), run / f"step-{step}")
        else:
            assert not command("diff", run / f"step-{step - 1}", whole, "-o", run / f"step-{step}").code
    for place in (run, server.put("run", run)):
        result = ckpt.runs.prune(place, "last:1", unchanged_for=0, dry_run=True)
        assert [one.step for one in result.retained] == [3, 2, 1], place
        assert {one.reason for one in result.retained[1:]} == {"another one that stays reads from it"}
        assert names(result.removed) == ["step-0"]


def test_prune_leaves_what_the_parity_of_the_run_needs(tmp_path: Path) -> None:
    for step in (10, 20):
        model(tmp_path / f"step-{step}", step)
    ckpt.protect(tmp_path, 1, by="folder")
    for step in (30, 40):
        model(tmp_path / f"step-{step}", step)
    result = ckpt.runs.prune(tmp_path, "last:1")
    assert (names(result.removed), names(result.retained)) == (["step-30"], ["step-40", "step-20", "step-10"])
    assert {one.reason for one in result.retained[1:]} == {"the parity of the run needs it"}
    assert not ckpt.repair(tmp_path).damaged


def test_prune_leaves_a_checkpoint_whose_name_is_too_long_and_removes_the_others(tmp_path: Path) -> None:
    long = f"step-{2:0240}"
    for number, name in enumerate(("step-1", long, "step-3", "step-4")):
        model(tmp_path / name, number, NOON + number)
    result = ckpt.runs.prune(tmp_path, "last:1")
    assert (names(result.removed), names(result.retained)) == (["step-3", "step-1"], ["step-4", long])
    assert result.retained[1].reason == "its name is too long to be removed at once"


def test_prune_removes_single_files_of_a_run(tmp_path: Path, server: StoreServer, user: object) -> None:
    for step in (10, 20, 30):
        path = tmp_path / f"epoch=0-step={step}.safetensors"
        save_file({"w": np.full(3, step, np.float32)}, path)
        if step != 10:  # what is beside a file goes with it
            ckpt.seal(path)
            ckpt.protect(path, 1)
        os.utime(path, (NOON, NOON))
    url = server.put("run", tmp_path)
    for run in (tmp_path, url):
        removed = names(ckpt.runs.prune(run, "last:1", unchanged_for=0).removed)
        assert removed == ["epoch=0-step=20.safetensors", "epoch=0-step=10.safetensors"]
    last = "epoch=0-step=30.safetensors"
    objects = {meta["path"].split("/")[1] for page in obstore.list(server.client, "run/") for meta in page}
    left = {path.name for path in tmp_path.iterdir()}
    assert objects == left == {last, f"{last}.ckpt-seal", f".{last}.ckpt-parity"}


def test_prune_in_a_bucket_removes_the_objects_of_a_checkpoint(run: Path, server: StoreServer, user: object) -> None:
    url = server.put("run", run)
    for note in ("job", "published", "committed", "journal/receipts-1"):  # of a job without the right to delete them
        obstore.put(server.client, f"run/checkpoint-70/.ckpt/{note}", b"{}")
    result = ckpt.runs.prune(url, "last:2,every:40", unchanged_for=0)
    # The link is an object like all others, and names nothing.
    assert names(result.removed) == [f"checkpoint-{n}" for n in (70, 60, 30, 20, 10)]
    left = {meta["path"] for page in obstore.list(server.client, "run") for meta in page}
    assert not [key for key in left if key.startswith(("run/checkpoint-70/", "run/checkpoint-10/")) or ".ckpt" in key]
    assert {"run/base/model.safetensors", "run/latest", "run/checkpoint-400"} <= left


def test_command_shows_each_checkpoint_and_why_it_stays(run: Path) -> None:
    done = command("prune", run, "--keep", "last:1,daily:2", "--dry-run")
    assert done.out.splitlines()[-1].startswith("would remove 6 of 12 checkpoints, ")
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("checkpoint-")}
    assert "stays: last:1, daily" in rows["checkpoint-100"]
    assert "stays: incomplete" in rows["checkpoint-110"]
    assert "would go" in rows["checkpoint-30"]
    report = json.loads(command("prune", run, "--keep", "last:1", "--json").out)
    assert (len(report["removed"]), report["dry_run"]) == (7, False)
    assert not (run / "checkpoint-30").exists()


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["run", "--keep", "newest:3"], USAGE, "is not a rule for what to keep"),
        (["run"], USAGE, "missing option '--keep'"),
        ([SAMPLES / "universal-1-delta", "--keep", "last:1"], USAGE, "ckpt compact"),
        ([SAMPLES / "damaged", "--keep", "last:1"], NOT_FOUND, "named after its step"),
        (["broken", "--keep", "last:1"], BROKEN, "no complete checkpoint"),
    ],
)
def test_prune_refuses(
    words: list[object], code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "run" / "step-1", 1)
    (tmp_path / "broken" / "step-1").mkdir(parents=True)
    (tmp_path / "broken" / "step-1" / "model.safetensors").write_bytes(b"")
    done = command("prune", *words)
    assert (done.code, text in done.err) == (code, True), done.err


def test_clean_and_the_next_prune_finish_a_removal(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        model(tmp_path / f"step-{step}", step)
    for step in (1, 2):
        os.rename(tmp_path / f"step-{step}", tmp_path / f".step-{step}.ckpt-removed")
    assert ckpt.runs.latest(tmp_path).step == 3
    assert ckpt.clean(tmp_path / "step-1").files == 1
    assert ckpt.runs.prune(tmp_path, "last:1").finished == ("step-2",)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


@pytest.mark.slow
def test_file_that_is_saved_again_after_a_killed_prune_is_whole(tmp_path: Path) -> None:
    old, run = tmp_path / "old", tmp_path / "run"
    old.mkdir()
    for step in (1, 2):
        save_file({"w": np.full(3, step, np.float32)}, old / f"step={step}.safetensors")
    ckpt.seal(old / "step=1.safetensors")
    ckpt.protect(old / "step=1.safetensors", 1)
    shutil.copytree(old, run)
    count = points(lambda: ckpt.runs.prune(run, "last:1", unchanged_for=0), run)
    for point in range(count):
        shutil.rmtree(run)
        shutil.copytree(old, run)
        assert killed(lambda: ckpt.runs.prune(run, "last:1", unchanged_for=0), run, point)
        if not (saved := run / "step=1.safetensors").exists():
            save_file({"w": np.full(3, 7, np.float32)}, saved)
            ckpt.runs.prune(run, "last:9", unchanged_for=0)
            assert ckpt.open(saved)["w"].weight[:].tolist() == [7, 7, 7]
            assert not ckpt.verify(ckpt.open(saved))
            assert sorted(path.name for path in run.iterdir()) == ["step=1.safetensors", "step=2.safetensors"]


def _interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_objects_that_are_put_again_after_a_killed_removal_stay(
    tmp_path: Path, server: StoreServer, user: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "run" / "step-1", 1)
    url = server.put("run", tmp_path / "run")
    step = source_path(f"{url}/step-1")
    with monkeypatch.context() as patch:
        patch.setattr("ckpt.pipeline.removal._delete_objects", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(step)
    time.sleep(2.1)  # more than the clocks of the servers of a store differ, and it may count whole seconds
    server.put("run", tmp_path / "run")
    ckpt.clean(f"{url}/step-1")
    assert ckpt.open(f"{url}/step-1")["w"].weight[:].tolist() == [1, 1, 1]
    assert [meta["path"] for page in obstore.list(server.client, "run") for meta in page] == [
        "run/step-1/model.safetensors"
    ]


@pytest.mark.slow
def test_removal_that_is_killed_between_its_requests_leaves_no_checkpoint(
    server: StoreServer, user: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that wrote it could not remove its notes, which say that all is there."""
    deletions, count = BucketPlace.delete, 0

    def delete(place: BucketPlace, keys: Iterable[str]) -> None:
        nonlocal count
        if count == 0:
            raise KeyboardInterrupt
        count -= 1
        deletions(place, keys)

    for number in range(1, 6):
        url = server.put(f"run-{number}", SAMPLES / "universal-1-plain")
        for note in ("job", "published"):
            obstore.put(server.client, f"run-{number}/.ckpt/{note}", b'{"files": ["manifest.json"]}')
        count = number
        with monkeypatch.context() as patch:
            patch.setattr(BucketPlace, "delete", delete)
            with pytest.raises(KeyboardInterrupt):
                remove_checkpoint(source_path(url))
        with pytest.raises(ckpt.CkptError):
            ckpt.verify(ckpt.open(url))
        left = {
            meta["path"].partition("/")[2] for page in obstore.list(server.client, f"run-{number}/") for meta in page
        }
        assert ".ckpt/published" not in left
        assert number == 1 or "manifest.json" not in left
        ckpt.clean(url)
        assert not [meta for page in obstore.list(server.client, f"run-{number}/") for meta in page]


@pytest.mark.slow
def test_kills_never_lose_the_last_whole_checkpoint(tmp_path: Path) -> None:
    """A sample of `run.py prune_kills`."""
    make_run(tmp_path / "original")
    generator = random.Random(1)
    for _ in range(6):
        folder_round(tmp_path / "original", tmp_path / "work", generator)
    shutil.rmtree(tmp_path / "original")


def test_a_removal_that_is_finished_leaves_the_seal_that_a_copy_has_just_written(tmp_path: Path) -> None:
    (tmp_path / ".a.safetensors.ckpt-removed").write_bytes(b"old")
    (tmp_path / "a.safetensors.ckpt-seal").write_bytes(b"new")  # a copy writes it before the file
    assert finish_removals(tmp_path) == ["a.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors.ckpt-seal"]
