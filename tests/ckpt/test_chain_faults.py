"""Chains on disks that are full or read-only, in other places, written by two at once, and restored with interrupts."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.job import replay_first
from ckpt.pipeline import target as life
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file
from damage import ckpt
from held import contents
from killing import interrupted, killed, points, spread
from small_disk import mounted, remount
from training import chained

CKPT = [sys.executable, "-m", "ckpt_cli"]
LOCKED, UNSUPPORTED, FULL, OUTPUT, INTERRUPTED = 11, 22, 28, 30, 130
STEPS = 4
ROOM = 100 << 10
"""Bytes, less than a delta or a base takes."""
STOPS = 6
"""At so many points of a restore, evenly from its first change on."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four states, `step1` to `step4`, and a chain of the first three."""
    at = chained(tmp_path_factory.mktemp("whole"), STEPS)
    (at / "run").rename(at / "all")
    for step in range(1, STEPS):
        assert ckpt("append", at / "run", at / f"step{step}").code == 0
    return at


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """The chain, to be changed."""
    return shutil.copytree(whole / "run", tmp_path / "run")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    with mounted(tmp_path / "disk", "64m") as folder:
        yield folder


def fill(disk: Path, room: int) -> None:
    """Leave so many bytes free."""
    usage = shutil.disk_usage(disk)
    remount(disk, f"size={usage.used + room}")


def snapshot(run: Path) -> dict[str, bytes]:
    """All that is named by the chain, and the chain's list."""
    kept = {"chain.json", *(member.folder for member in chain_file.read(run).members)}
    files = (path for path in run.rglob("*") if path.is_file() and path.relative_to(run).parts[0] in kept)
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def is_state(run: Path, saved: Path) -> bool:
    return contents(open_checkpoint(run)) == contents(open_checkpoint(saved))


@pytest.mark.quick(1)
@pytest.mark.parametrize("command", ["diff", "compact"])
def test_chain_stays_as_it_was_on_a_full_disk(command: str, whole: Path, disk: Path) -> None:
    run = shutil.copytree(whole / "run", disk / "run")
    before = snapshot(run)
    arguments = ("append", run, whole / "step4") if command == "diff" else ("compact", run, "--keep", "last:1")
    fill(disk, ROOM)
    done = ckpt(*arguments)
    assert done.code == FULL, done.err
    assert "space left" in done.err
    assert str(run) in done.err
    assert "Traceback" not in done.err
    assert snapshot(run) == before
    assert ckpt("verify", run).code == 0
    remount(disk, "size=64m")
    done = ckpt(*arguments)
    assert done.code == 0, done.err
    assert is_state(run, whole / ("step4" if command == "diff" else "step3"))
    members = [member.folder for member in chain_file.read(run).members]
    assert sorted(os.listdir(run)) == ["chain.json", "chain.lock", *members]


def test_a_chain_that_cannot_even_begin_leaves_nothing_that_looks_like_one(whole: Path, disk: Path) -> None:
    fill(disk, ROOM)
    done = ckpt("append", disk / "run", whole / "step1")
    assert done.code == FULL, done.err
    assert ckpt("log", disk / "run").code == 10
    remount(disk, "size=64m")
    assert ckpt("append", disk / "run", whole / "step1").code == 0
    assert is_state(disk / "run", whole / "step1")


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_room_for_the_replay_is_looked_for_before_anything_is_written(form: str, whole: Path, disk: Path) -> None:
    raw = chain_file.read(whole / "run").members[-1].raw_nbytes
    fill(disk, raw + ROOM)  # for the target, and not for what is replayed beside it
    done = ckpt("restore", whole / "run", disk / "out", "--to", form)
    assert done.code == FULL, done.err
    assert "replayed next to the target" in done.err
    assert os.listdir(disk) == []
    dry = ckpt("restore", whole / "run", disk / "out", "--to", form, "--dry-run")
    assert "replayed next to the target" in dry.err
    done = ckpt("restore", whole / "run", disk / "out")
    assert done.code == 0, done.err
    assert is_state(disk / "out", whole / "step3")


def test_a_disk_that_fills_up_while_it_is_replayed(whole: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = chain_file.read(whole / "run").members[-1].raw_nbytes
    fill(disk, raw + ROOM)
    monkeypatch.setattr(replay_first, "_check_space", lambda *given: None)  # as if another took it meanwhile
    arguments = ("restore", whole / "run", disk / "out", "--to", "dcp")
    assert ckpt(*arguments).code == FULL
    assert os.listdir(disk) == [".out.ckpt-partial"]
    remount(disk, "size=64m")
    monkeypatch.undo()
    assert ckpt(*arguments).code == 0
    assert os.listdir(disk) == ["out"]
    assert is_state(disk / "out", whole / "step3")


def test_a_file_system_that_is_read_only(whole: Path, disk: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", disk / "run")
    remount(disk, "ro")
    for command in ("log", "verify", "inspect"):
        assert ckpt(command, run).code == 0
    for form in ("universal", "dcp"):
        done = ckpt("restore", run, tmp_path / form, "--to", form, "--step", "2")
        assert done.code == 0, done.err
        assert is_state(tmp_path / form, whole / "step2")
    assert ckpt("compact", run, "--keep", "last:1", "--dry-run").code == 0
    assert ckpt("append", run, whole / "step4", "--dry-run").code == 0
    for arguments in (("append", run, whole / "step4"), ("compact", run, "--keep", "last:1")):
        done = ckpt(*arguments)
        assert done.code == OUTPUT, done.err
        assert "Read-only" in done.err
        assert str(run) in done.err


@pytest.mark.parametrize("command", ["diff", "compact"])
@pytest.mark.slow
def test_a_limit_of_file_sizes(command: str, whole: Path, run: Path) -> None:
    before = snapshot(run)
    arguments = ["append", run, whole / "step4"] if command == "diff" else ["compact", run, "--keep", "last:1"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = subprocess.run([*CKPT, *map(str, arguments)], capture_output=True, text=True, preexec_fn=limit, timeout=120)
    assert done.returncode == OUTPUT, done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert snapshot(run) == before
    assert ckpt(*arguments).code == 0


def test_a_chain_may_be_moved_and_renamed_as_a_whole(whole: Path, run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "an archive" / "of 2026"
    elsewhere.parent.mkdir()
    run.rename(elsewhere)
    assert ckpt("verify", elsewhere).code == 0
    assert ckpt("append", elsewhere, whole / "step4").code == 0
    assert ckpt("compact", elsewhere, "--keep", "2").code == 0
    (tmp_path / "link").symlink_to(elsewhere)
    for at in (elsewhere, tmp_path / "link"):
        assert is_state(at, whole / "step4")
        out = tmp_path / f"out-{at.name}"
        assert ckpt("restore", at, out, "--step", "2").code == 0
        assert is_state(out, whole / "step2")


@pytest.mark.slow
def test_two_that_append_at_once(whole: Path, tmp_path: Path) -> None:
    """One of them waits for nobody: it is told. Whoever is told may come again, unless its step has gone by."""
    random_ = random.Random(1)
    codes = []
    for i in range(20):
        if i >= 3 and any(LOCKED in pair for pair in codes):
            break  # on a busy machine, two rarely meet
        run = shutil.copytree(whole / "run", tmp_path / f"run{i}")
        both = []
        for step in (10, 11):
            arguments = ["append", run, whole / "step4", "--step", step]
            both.append(subprocess.Popen([*CKPT, *map(str, arguments)], stderr=subprocess.PIPE, text=True))
            time.sleep(random_.random() * 0.2 * (i % 3))
        errors = [one.communicate(timeout=120)[1] for one in both]
        codes.append([one.returncode for one in both])
        assert 0 in codes[-1], errors
        assert set(codes[-1]) <= {0, LOCKED, UNSUPPORTED}, errors
        steps = [member.step for member in chain_file.read(run).members]
        assert steps[:3] == [1, 2, 3]
        assert len(steps) == 3 + codes[-1].count(0)
        assert all(
            "another process is changing this chain" in s for s, c in zip(errors, codes[-1], strict=True) if c == 11
        )
        assert ckpt("verify", run).code == 0
        assert is_state(run, whole / "step4")
    assert any(LOCKED in pair for pair in codes)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [killed, interrupted])
@pytest.mark.parametrize("form", ["universal", "dcp"])
def test_a_restore_that_is_stopped_leaves_no_target_and_goes_on(
    form: str, stop: Callable[..., object], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    out, stage, seen = folder / "out", folder / ".out.ckpt-partial", tmp_path / "seen.json"
    arguments = ["restore", whole / "all", out, "--to", form]

    def restore() -> None:
        done = ckpt(*arguments)
        seen.write_text(json.dumps([done.code, done.err]))

    many = points(restore, folder)
    assert is_state(out, whole / "step4")
    unfinished = 0
    # When all values are written, an interrupt comes too late, and the restore is finished: after a third of them.
    for point in spread(many if stop is killed else many // 3, STOPS):
        shutil.rmtree(out)
        seen.unlink(missing_ok=True)
        stop(restore, folder, point)
        code, err = json.loads(seen.read_text()) if seen.exists() else (None, "")
        assert code is not None or stop is killed
        if not out.exists():
            unfinished += 1
            assert code in (None, INTERRUPTED)
            assert ("run the same command again" in err) == (code == INTERRUPTED)
            assert "Traceback" not in err
            assert set(os.listdir(folder)) <= {stage.name}  # none yet, if it was killed in front of its first change
            assert ckpt(*arguments).code == 0
            assert os.listdir(folder) == ["out"]
        shutil.rmtree(stage, ignore_errors=True)  # killed between the last rename and the last removal
        assert is_state(out, whole / "step4")
    assert unfinished > STOPS // 2


@pytest.mark.slow
def test_restore_writes_nothing_that_was_replayed_of_another_chain(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, chain, seen = tmp_path / "out.pt", tmp_path / "chain", list[str]()
    arguments = ("convert", f"{chain}@3", out, "--to", "torch", "--only", ".")

    def interrupt(point: str) -> None:
        seen.append(point)
        if point == "written" and "renamed" in seen:
            raise KeyboardInterrupt

    shutil.copytree(whole / "run", chain)
    monkeypatch.setattr(life, "reached", interrupt)
    assert ckpt(*arguments).code == INTERRUPTED
    assert list((tmp_path / ".out.pt.ckpt-partial").glob("replayed-*"))
    monkeypatch.undo()
    shutil.rmtree(chain)
    for state, step in (("step1", 1), ("step4", 3)):
        assert ckpt("append", chain, whole / state, "--step", step).code == 0
    assert ckpt(*arguments).code == 0
    assert is_state(out, whole / "step4")


def test_spilled_states_of_a_killed_command_are_not_part_of_the_target(whole: Path, tmp_path: Path) -> None:
    """While states of a chain are encoded again, they are beside the pack."""
    folder = tmp_path / "folder"
    folder.mkdir()
    out, stage = folder / "out", folder / ".out.ckpt-partial"

    def compress() -> None:
        assert ckpt("compress", whole / "all", out, "--workers", "1").code == 0

    many, spilled = points(compress, folder), 0
    for point in spread(many, 7):
        shutil.rmtree(out)
        killed(compress, folder, point)
        if not out.exists():
            spilled += bool(list(stage.rglob("*.replayed")))
            ballast = [bytearray(i) for i in range(point)]  # other addresses than in the process that was killed
            compress()
            del ballast
        shutil.rmtree(stage, ignore_errors=True)
        paths = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
        assert paths == {"manifest.json", "original.json", "index.safetensors", "packs/00000.safetensors"}
    assert spilled
    assert is_state(out, whole / "step4")
