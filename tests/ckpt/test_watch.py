"""Each new checkpoint of a run is stored elsewhere once, in order, and only what is stored is pruned."""

import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jsonschema
import numpy as np
import obstore
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt.runs.new import NewCheckpoints
from ckpt.types import PruneResult, SkippedCheckpoint, StoredCheckpoint
from ckpt_cli.main import TERMINATED, USAGE
from damage import NOT_FOUND
from damage import ckpt as command
from object_stores import StoreServer
from watch_kills import kill_round, make_run

MAKE_JSON = Path(__file__).parents[2] / "docs" / "make_json.py"
SCHEMA = runpy.run_path(str(MAKE_JSON))["schemas"]()["$defs"]["watch"]
EVERY = 0.05


def save(run: Path, step: int, value: float | None = None, name: str = "") -> Path:
    """Save a step as Hugging Face's Trainer does, and something else beside the weights."""
    folder = run / (name or f"checkpoint-{step}")
    folder.mkdir(parents=True)
    values = np.full((4, 64), step if value is None else value, np.float32)
    save_file({"w": values + np.arange(64, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "mine.txt").write_text(f"of step {step}")
    return folder


def watched(run: Path | str, target: Path | str, **options: object) -> list[str]:
    """What one pass over a run does, as text."""
    return [shown(one) for one in ckpt.runs.watch(run, target, every=EVERY, once=True, **options)]  # type: ignore[arg-type]


def shown(one: StoredCheckpoint | SkippedCheckpoint | PruneResult) -> str:
    if isinstance(one, PruneResult):
        return f"pruned {','.join(gone.path.name for gone in one.removed)}"
    if isinstance(one, SkippedCheckpoint):
        return f"skipped {one.path.name}: {one.error.what}"
    return f"{one.kind} {one.path.name}"


@pytest.mark.parametrize("target", ["run.chain", "copies"])
def test_watch_stores_each_whole_checkpoint_once_in_the_order_of_steps(target: str, tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / target
    kinds = ["base", "delta", "delta"] if target.endswith(".chain") else ["copy"] * 3
    for step in (1000, 9, 200):
        save(run, step)
    os.truncate(save(run, 30) / "model.safetensors", 100)
    planned = watched(run, place, dry_run=True)
    assert planned[0].startswith("skipped checkpoint-30: ")
    assert planned[1:] == [f"{kind} checkpoint-{step}" for kind, step in zip(kinds, (9, 200, 1000), strict=True)]
    assert not place.exists()
    assert watched(run, place) == planned
    assert watched(run, place) == planned[:1]
    later = save(run, 1100)
    assert watched(run, place)[1:] == [f"{kinds[-1]} checkpoint-1100"]
    for step in (9, 200, 1000, 1100):
        stored = ckpt.open(f"{place}@{step}" if target.endswith(".chain") else place / f"checkpoint-{step}")
        assert ckpt.diff(stored, ckpt.open(run / f"checkpoint-{step}")).same
    shutil.rmtree(later)
    save(run, 1100, value=7.0)  # the run started again: neither stored nor pruned
    again = watched(run, place, keep="last:1,every:1000")
    assert [one.partition(" after")[0] for one in again if "1100" in one] == ["skipped checkpoint-1100: changed"]
    assert [one for one in again if one.startswith("pruned")] == ["pruned checkpoint-200,checkpoint-9"]
    assert sorted(path.name for path in run.iterdir()) == [f"checkpoint-{step}" for step in (1000, 1100, 30)]


def test_watch_prunes_only_what_is_stored_with_equal_values(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "copies"
    for step in (1, 2, 3):
        save(run, step)
    watched(run, place)
    other = place / "checkpoint-2" / "model.safetensors"
    shutil.copy(place / "checkpoint-1" / "model.safetensors", other)  # another state of the same size, and newer
    assert watched(run, place, keep="last:1") == ["pruned checkpoint-1"]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert (place / "checkpoint-1" / "mine.txt").read_text() == "of step 1"


def test_watch_prunes_no_checkpoint_in_which_an_older_file_came_since(tmp_path: Path) -> None:
    run, place, other = tmp_path / "run", tmp_path / "copies", save(tmp_path, 0)
    os.utime(other / "model.safetensors", (1e9, 1e9))
    for step in (1, 2):
        save(run, step)
    for one in ckpt.runs.watch(run, place, keep="last:1", every=EVERY, once=True):
        if isinstance(one, StoredCheckpoint) and one.step == 2:
            shutil.copy2(other / "model.safetensors", run / "checkpoint-1")
        assert not isinstance(one, PruneResult), one
    assert (run / "checkpoint-1").is_dir()


@pytest.mark.parametrize("is_new", [True, False])
def test_watch_prunes_no_checkpoint_of_which_a_file_beside_the_weights_came_or_changed_since(
    is_new: bool, tmp_path: Path
) -> None:
    """As one of a slow rank does, with the state of its random numbers."""
    run, place = tmp_path / "run", tmp_path / "copies"
    for step in (1, 2):
        save(run, step)
    watched(run, place)
    (run / "checkpoint-1" / ("late.txt" if is_new else "mine.txt")).write_text("of STEP 1")
    save(run, 3)
    assert [one.partition(":")[0] for one in watched(run, place, keep="last:1")] == [
        "skipped checkpoint-1",
        "copy checkpoint-3",
        "pruned checkpoint-2",
    ]
    assert (run / "checkpoint-1").is_dir()


def test_new_checkpoints_come_when_they_are_whole_and_after_those_before_them(tmp_path: Path) -> None:
    new = NewCheckpoints(tmp_path, EVERY)

    def look() -> list[str]:
        return [one.path.name for one in new.look()]

    save(tmp_path, 1)
    assert [look(), look(), look()] == [[], ["checkpoint-1"], []]
    growing = save(tmp_path, 2)
    save(tmp_path, 3)
    assert look() == []
    (growing / "more.txt").write_text("it grows")
    assert look() == [], "3 does not change, but 2 is before it and still grows"
    assert look() == ["checkpoint-2", "checkpoint-3"]
    (growing / "mine.txt").write_text("changed")
    assert [look(), look()] == [[], ["checkpoint-2"]]


def test_watch_goes_on_until_it_is_stopped(tmp_path: Path) -> None:
    run, place, stop = tmp_path / "run", tmp_path / "run.chain", threading.Event()
    events = ckpt.runs.watch(run, place, every=EVERY, stop=stop, keep="last:1")  # the folder appears later
    save(run, 1)
    assert shown(next(events)) == "base checkpoint-1"
    save(run, 2)
    assert {shown(next(events)) for _ in range(2)} == {"delta checkpoint-2", "pruned checkpoint-1"}
    save(run, 5, name="no-number")
    assert shown(next(events)).startswith("skipped no-number: neither it nor its name states a step")
    save(run, 3)
    assert shown(next(events)) == "delta checkpoint-3", "the state before it was appended from has been pruned"
    stop.set()
    assert list(events) == []
    assert list(ckpt.Chain(place)) == [1, 2, 3]
    rest = [shown(one).split()[0] for one in ckpt.runs.watch(run, place, every=EVERY, timeout=3 * EVERY)]
    assert rest == ["skipped"]


def test_watch_copies_to_a_bucket(tmp_path: Path, server: StoreServer, user: object) -> None:
    run = tmp_path / "run"
    save(run, 1)
    save(run, 2)
    url = server.put("elsewhere/notes.txt", run / "checkpoint-1" / "mine.txt").replace("/notes.txt", "")
    assert watched(run, url, keep="last:1") == ["copy checkpoint-1", "copy checkpoint-2", "pruned checkpoint-1"]
    assert watched(run, url, keep="last:1") == []
    keys = sorted(meta["path"] for page in obstore.list(server.client, "elsewhere") for meta in page)
    files = [f"checkpoint-{step}/{name}" for step in (1, 2) for name in ("mine.txt", "model.safetensors")]
    assert keys == [f"elsewhere/{name}" for name in (*files, "notes.txt")]
    shutil.rmtree(run)
    assert watched(url, tmp_path / "back.chain") == ["base checkpoint-1", "delta checkpoint-2"]


def test_watch_command_prints_a_line_for_each_event(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "run.chain"
    for step in (1, 2):
        save(run, step)
    os.truncate(save(run, 0) / "model.safetensors", 100)
    words = ("watch", run, place, "--once", "--interval", "0.05s", "--keep", "last:1", "--json")
    lines = [json.loads(line) for line in command(*words).out.splitlines()]
    assert [line["event"] for line in lines] == ["skipped", "stored", "stored", "pruned"]
    for line in lines:
        jsonschema.Draft202012Validator(SCHEMA).validate(line)
    shutil.rmtree(run / "checkpoint-0")
    assert "nothing is new" in command(*words[:-1]).out
    (tmp_path / "link").symlink_to(run)
    for wrong, code, says in (
        ((run / "checkpoint-2", place), USAGE, "one checkpoint, not the folder of a run"),
        ((tmp_path / "gone", place), NOT_FOUND, "no such folder"),
        ((run, tmp_path / "copies", "--base-every", "2"), USAGE, "for a chain"),
        ((run, tmp_path / "link" / "copies"), USAGE, "is in the folder of the run"),
        ((run, place, "--keep", "newest"), USAGE, "last:N"),
    ):
        ran = command("watch", *wrong, "--once", "--interval", "0.05s")
        assert (ran.code, says in ran.err) == (code, True), ran.err


@pytest.mark.slow
def test_watch_ends_with_the_exit_code_of_sigterm(tmp_path: Path) -> None:
    save(tmp_path / "run", 7)
    words = [sys.executable, "-m", "ckpt_cli", "watch", tmp_path / "run", tmp_path / "copies", "--interval", "0.1s"]
    with subprocess.Popen([*words, "--json"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["step"] == 7
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == TERMINATED
        assert json.loads(process.stdout.read())["error"]["kind"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["run.chain", "copies"])
def test_watch_that_is_killed_loses_nothing_and_goes_on(target: str, tmp_path: Path) -> None:
    make_run(tmp_path / "original")
    kill_round(tmp_path / "original", tmp_path / "work", target, random.Random(5))
