"""The folder that a follower serves: verified steps behind one link, whatever happens to the chain or the process."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from ckpt.following import mapped_weights
from ckpt.following import served as served_module
from ckpt.following.follow import FollowEvent, follow_into
from ckpt.following.served import RECORD, ServedFolder
from ckpt.following.source import PublishedSource
from ckpt_formats.core.errors import CorruptError, LockedError, NoSpaceError, NotFoundError, OutputError, UnsafeError
from followed_weights import FILES, bytes_of, bytes_of_torch, flip, objects_of, publish, weights_at
from published import PublishedRun
from recording_server import recording_server
from small_disk import mounted, remount


@pytest.fixture
def run(tmp_path: Path) -> PublishedRun:
    """Steps 1 to 3 of two ranks; step 1 is a base."""
    run = PublishedRun(tmp_path / "policy.chain", weights_at(1), ranks=2, files=FILES)
    publish(run, range(1, 4))
    return run


def served_bytes(folder: Path) -> dict[str, bytes]:
    """The tensors of a folder, as the safetensors library reads them."""
    tensors = dict[str, bytes]()
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {name: bytes_of_torch(tensor) for name, tensor in load_file(path).items()}
    return tensors


def follow(run: PublishedRun, target: Path, **options: Any) -> list[FollowEvent]:
    events = list[FollowEvent]()
    follow_into(run.run, target, events.append, **{"once": True, **options})
    return events


def kinds(events: list[FollowEvent]) -> list[str]:
    return [event.kind for event in events]


def test_folder_serves_the_bits_of_each_step(
    run: PublishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_weights, "MAX_FILE_NBYTES", 1000)  # several files and an index
    target = tmp_path / "served"
    for step in range(3, 7):
        if step > 3:
            run.publish(step, weights_at(step), base=step == 5)
        events = follow(run, target)
        assert kinds(events) == (["serving"] if step == 3 else ["verified", "serving"])
        path = target / "current"
        assert os.readlink(path) == "ab"[(step - 3) % 2]
        assert served_bytes(path) == bytes_of(weights_at(step))
        assert (path / "config.json").read_bytes() == FILES["config.json"]
        assert json.loads((path / RECORD).read_bytes())["step"] == step
        index = json.loads((path / "model.safetensors.index.json").read_bytes())
        assert index["weight_map"].keys() == weights_at(step).keys()
        assert {one.name for one in target.iterdir()} == {"a", "b", "current", ".lock"} - (
            {"b"} if step == 3 else set()
        )
    assert kinds(follow(run, target)) == ["verified"]
    run.epoch = 2
    run.publish(2, weights_at(2, branch=1))
    events = follow(run, target)
    assert events[-1].step is not None
    assert (events[-1].step.epoch, events[-1].step.step, events[-1].step.continues) == (2, 2, (1, 6))
    assert served_bytes(target / "current") == bytes_of(weights_at(2, branch=1))


def test_step_is_chosen_by_its_number(run: PublishedRun, tmp_path: Path) -> None:
    target = tmp_path / "served"
    for step in (2, 1, 3):
        follow(run, target, step=step)
        assert served_bytes(target / "current") == bytes_of(weights_at(step))
    with pytest.raises(NotFoundError, match="step 9 of epoch 1 is not published"):
        follow(run, target, step=9)


@pytest.mark.parametrize("place", ["model.safetensors", "config.json", RECORD, "a"])
def test_folder_that_was_damaged_is_discarded_and_written_anew(run: PublishedRun, tmp_path: Path, place: str) -> None:
    target = tmp_path / "served"
    follow(run, target)
    if place == "a":
        (target / "a" / "model.safetensors").unlink()
    else:
        flip(target / "a" / place)
    events = follow(run, target)
    assert kinds(events) == ["discarded", "serving"]
    assert events[0].path is None
    assert served_bytes(target / "current") == bytes_of(weights_at(3))


def test_damaged_chain_leaves_what_is_served(run: PublishedRun, tmp_path: Path) -> None:
    target = tmp_path / "served"
    follow(run, target)
    run.publish(4, weights_at(4))
    flip(objects_of(run, None, 4)[0])
    with pytest.raises(CorruptError):
        follow(run, target)
    assert {one.name for one in target.iterdir()} == {"a", "current", ".lock"}
    assert served_bytes(target / "current") == bytes_of(weights_at(3))


class _Killed(BaseException):
    """Ends a process between two calls of the system."""


def test_killed_follower_serves_a_whole_step_wherever_it_ended(
    run: PublishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that changes the folder is the last one of a process, once. What is served then is a whole step."""
    target, calls = tmp_path / "served", 0
    follow(run, target)
    names = {os: ["rename", "replace", "symlink", "open", "unlink"], Path: ["mkdir", "unlink", "write_bytes"]}
    for step in range(4, 40):
        run.publish(step, weights_at(step))
        left = step - 4
        with monkeypatch.context() as patch:

            def count(original: Any) -> Any:
                def call(*arguments: Any, **options: Any) -> Any:
                    nonlocal left
                    if str(target) in str(arguments[:2]):
                        left -= 1
                        if left < 0:
                            raise _Killed
                    return original(*arguments, **options)

                return call

            for owner, functions in names.items():
                for name in functions:
                    patch.setattr(owner, name, count(getattr(owner, name)))
            # A killed process removes nothing.
            patch.setattr(served_module, "suppress", lambda *kinds: _no_cleaning())
            try:
                follow(run, target)
            except _Killed:
                calls += 1
            else:
                break
        if (target / "current").exists():
            there = json.loads((target / "current" / RECORD).read_bytes())["step"]
            assert served_bytes(target / "current") == bytes_of(weights_at(there))
            assert there in (step, step - 1)
        assert kinds(follow(run, target))[-1] in ("serving", "verified")
        assert served_bytes(target / "current") == bytes_of(weights_at(step))
    assert calls > 10


@pytest.mark.parametrize("released", [False, True])
def test_folder_before_that_was_half_removed_is_no_obstacle(
    run: PublishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    target, source = tmp_path / "served", PublishedSource(run.run, patience=0.0)

    def remove_half(path: Path) -> None:
        if path.is_dir() and (path / RECORD).exists():
            (path / RECORD).unlink()
            raise _Killed

    def write_half(*arguments: object) -> None:
        raise _Killed

    with ServedFolder(target, source, 2) as served:
        for step in range(3, 6):
            if step > 3:
                run.publish(step, weights_at(step))
            head = source.head()
            assert head is not None
            if step == 5:
                if released:
                    served.release_other()
                    monkeypatch.setattr(served_module, "write_state", write_half)
                monkeypatch.setattr(served_module, "_remove", remove_half)
                with pytest.raises(_Killed):
                    served.advance(head, head.record)
            else:
                served.advance(head, head.record)
    monkeypatch.undo()
    assert kinds(follow(run, target)) == ["verified", "serving"]
    assert served_bytes(target / "current") == bytes_of(weights_at(5))


class _no_cleaning:
    def __enter__(self) -> None:
        raise _Killed

    def __exit__(self, *arguments: object) -> None: ...


def test_folder_before_has_its_own_files_until_it_is_released(run: PublishedRun, tmp_path: Path) -> None:
    target = tmp_path / "served"
    source = PublishedSource(run.run, patience=0.0)
    with ServedFolder(target, source, 2) as served:

        def advance() -> np.ndarray[Any, Any]:
            head = source.head()
            assert head is not None
            served.advance(head, head.record)
            return np.memmap(target / "current" / "model.safetensors", mode="r")

        maps = []
        for step in range(4, 8):
            maps.append(advance())
            if step == 6:
                served.release_other()
            run.publish(step, weights_at(step))
    third, _, fifth, last = (bytes(one) for one in maps)
    assert third != fifth  # both in `a`, each in files of its own
    assert len({third, fifth, last}) == 3
    assert bytes(maps[1]) == last  # nobody reads it any more: the last step was written into the files of step 4
    assert served_bytes(target / "current") == bytes_of(weights_at(6))


def test_files_of_the_model_are_read_once(run: PublishedRun, tmp_path: Path) -> None:
    source = PublishedSource(run.run, patience=0.0)
    with ServedFolder(tmp_path / "served", source, 1) as served:
        for step in (3, 4):
            head = source.head()
            assert head is not None
            advance = served.advance(head, head.record)
            assert (advance.step.step, (advance.path / "config.json").read_bytes()) == (step, FILES["config.json"])
            for ref in run.model.files.values():
                (run.run / ref.key).unlink(missing_ok=True)
            run.publish(4, weights_at(4))


def test_each_step_is_posted_and_run_and_failures_do_not_stop_following(run: PublishedRun, tmp_path: Path) -> None:
    target, log = tmp_path / "served", tmp_path / "log"
    command = f'echo "$CKPT_EPOCH $CKPT_STEP $CKPT_HASH $CKPT_PATH" >> {log}; exit 3'
    with recording_server() as server:
        events = follow(run, target, notify=f"{server.url}/reload", command=command)
    step = events[0].step
    assert step is not None
    fields = {"step": 3, "epoch": 1, "hash": step.hash, "path": str(target / "a")}
    assert server.exchange == [("/reload", {**fields, "model_path": str(target / "a"), "weight_version": "3"})]
    assert log.read_text() == f"1 3 {step.hash} {target / 'a'}\n"
    assert [(event.kind, event.error, event.exit_code) for event in events] == [
        ("serving", None, None),
        ("notified", None, None),
        ("executed", None, 3),
    ]
    run.publish(4, weights_at(4))
    with recording_server({"/reload": (500, {"error": "no"})}) as server:
        events = follow(run, target, notify=f"{server.url}/reload")
    assert kinds(events) == ["verified", "serving", "notified"]
    assert "answered 500" in str(events[-1].error)


def test_command_prints_an_event_on_each_line_until_a_signal_ends_it(run: PublishedRun, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef\n")
    signed = PublishedRun(tmp_path / "signed.chain", weights_at(1), key=b"0123456789abcdef", files=FILES)
    signed.publish(1, weights_at(1))
    words = [sys.executable, "-m", "ckpt_cli", "follow", str(signed.run), str(tmp_path / "served")]
    options = ["--key", str(key), "--exec", 'echo "$CKPT_STEP"', "--every", "0.05", "--json"]
    with subprocess.Popen([*words, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        events = [json.loads(process.stdout.readline()) for _ in range(3)]
        signed.publish(2, weights_at(2))
        events += [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        events.append(json.loads(process.stdout.readline()))
        assert process.wait(120) == 0
        assert process.stderr.read() == "1\n2\n"
    assert [one["event"] for one in events] == [*["serving", "executed", "waiting"] * 2, "stopped"]
    assert (events[3]["step"], events[3]["base"], events[3]["path"]) == (2, False, str(tmp_path / "served" / "b"))
    assert served_bytes(tmp_path / "served" / "current") == bytes_of(weights_at(2))


def test_folder_has_one_follower_and_nothing_else(run: PublishedRun, tmp_path: Path) -> None:
    target = tmp_path / "served"
    with ServedFolder(target, PublishedSource(run.run), 1), pytest.raises(LockedError):
        follow(run, target)
    for name in ("notes.txt", "a/weights.bin"):
        other = tmp_path / f"other-{name[0]}"
        (other / name).parent.mkdir(parents=True)
        (other / name).touch()
        with pytest.raises(OutputError, match="holds something else"):
            follow(run, other)
        assert (other / name).exists()


@pytest.mark.parametrize("name", ["model.safetensors", RECORD, "model.safetensors.index.json"])
def test_file_of_the_model_that_would_be_taken_for_weights_is_refused(tmp_path: Path, name: str) -> None:
    run = PublishedRun(tmp_path / "policy.chain", weights_at(1), files={name: b"x"})
    run.publish(1, weights_at(1))
    with pytest.raises(UnsafeError, match="the name of weights"):
        follow(run, tmp_path / "served")


def test_full_disk_leaves_what_is_served(run: PublishedRun, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m") as disk:
        target = disk / "served"
        follow(run, target)
        run.publish(4, weights_at(4))
        with pytest.raises(NoSpaceError, match="the next step needs") as caught:
            follow(run, target)
        assert caught.value.where == str(target)
        assert {one.name for one in target.iterdir()} == {"a", "current", ".lock"}
        assert served_bytes(target / "current") == bytes_of(weights_at(3))
        remount(disk, "size=4m")
        follow(run, target)
        assert served_bytes(target / "current") == bytes_of(weights_at(4))


def test_folder_is_served_again_after_a_link_that_could_not_be_replaced(
    run: PublishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PublishedSource(run.run)
    with ServedFolder(tmp_path / "served", source, 1) as served:
        head = source.head()
        assert head is not None
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(5, "Input/output error")))
            with pytest.raises(OutputError):
                served.advance(head, head.record)
        assert served.advance(head, head.record).path == tmp_path / "served" / "a"
    assert served_bytes(tmp_path / "served" / "current") == bytes_of(weights_at(3))


def test_follower_goes_on_while_the_chain_cannot_be_read(run: PublishedRun, tmp_path: Path) -> None:
    target, stop, events = tmp_path / "served", threading.Event(), list[FollowEvent]()
    hidden = tmp_path / "hidden"
    (run.run / "published").rename(hidden)

    def report(event: FollowEvent) -> None:
        events.append(event)
        if event.kind == "waiting" and event.step is None:
            hidden.rename(run.run / "published")
        elif event.kind == "serving" and event.step is not None and event.step.step == 3:
            run.publish(4, weights_at(4))
            run.publish(5, weights_at(5), base=True)
            for path in objects_of(run, None, 5):
                path.unlink()
        elif event.kind == "failed":
            run.publish(6, weights_at(6), base=True)
        elif event.kind == "serving":
            stop.set()

    follow_into(run.run, target, report, stop=stop, every=0.01, patience=0.0)
    assert kinds(events) == ["waiting", "serving", "failed", "serving"]
    assert served_bytes(target / "current") == bytes_of(weights_at(6))
