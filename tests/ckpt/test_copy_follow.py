"""A copy in a bucket that follows a chain: members and the log as they come, in parts, and never half of either."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import obstore
import pytest

import ckpt as library
import growing_log
from ckpt.chains.change import change
from ckpt.copying import follow
from ckpt.pipeline import Execution
from ckpt_formats.core.errors import CkptError, CorruptError, InvalidArgumentError, LockedError, OutputError
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores import bucket
from ckpt_formats.stores.bucket_place import BucketPlace
from ckpt_formats.stores.joined import joined, part_name, parts_of
from ckpt_formats.stores.location import source_path
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.states import open_steps
from damage import OUTPUT, SAMPLES, ckpt
from held import states
from object_stores import BUCKET, StoreServer

RECORDED = SAMPLES / "recorded-1" / "run.chain"
THERE = f"s3://{BUCKET}/a/run.chain"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A chain whose log has come to step 4, and to half of the record of step 5. `grow` adds the rest."""
    shutil.copytree(RECORDED, tmp_path / "run.chain")
    segment = open_steps(tmp_path / "run.chain", chain_file.read(RECORDED).segments[-1])
    for rank, log in enumerate(segment.logs):
        os.truncate(log.path, segment.nbytes_upto(rank, 4) + 100)
    return tmp_path / "run.chain"


def grow(run: Path) -> None:
    shutil.copytree(RECORDED, run, dirs_exist_ok=True)


def keys(server: StoreServer) -> list[str]:
    return sorted(meta["path"] for page in obstore.list(server.client, "a/") for meta in page)


def files(folder: Path) -> dict[str, bytes]:
    paths = (one for one in folder.rglob("*") if one.is_file() and one.name not in ("chain.lock", "chain.json"))
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in paths}


def test_a_log_is_followed_in_parts(
    user: StoreServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "PART_NBYTES", 20_000)
    first = library.update_copy(run, THERE)
    assert first.last == 4
    assert list(library.Chain(THERE)) == list(library.Chain(run)) == [0, 1, 2, 3, 4]
    assert library.update_copy(run, THERE).objects == 0
    grow(run)
    done = json.loads(ckpt("copy", run, THERE, "--update", "--json").out)
    assert done["last"] == 6
    assert 0 < done["objects"] < first.objects
    assert list(library.Chain(THERE)) == [0, 1, 2, 3, 4, 5, 6]
    for step in (2, 4, 6):
        assert ckpt("diff", f"{THERE}@{step}", f"{RECORDED}@{step}").code == 0
    assert ckpt("verify", THERE, "--replay").code == 0
    sizes = [meta["size"] for page in obstore.list(user.client, "a/") for meta in page if ".part-" in meta["path"]]
    assert len(sizes) > 8
    assert max(sizes) <= 20_000
    library.copy(THERE, tmp_path / "back")
    assert files(tmp_path / "back") == files(RECORDED)


def test_a_log_that_grows_while_it_is_sent_is_copied_as_far_as_it_was_read(
    user: StoreServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with a record when it is looked at, and is sent in parts, which takes a while."""
    send, segment = BucketPlace.create_from, open_steps(run, chain_file.read(run).segments[-1])
    names = {part_name(log.path.relative_to(run).as_posix(), 0): log.path for log in segment.logs}
    sizes = {name: segment.nbytes_upto(rank, 4) for rank, name in enumerate(names)}
    for name, path in names.items():
        os.truncate(path, sizes[name])

    def grow_and_send(place: BucketPlace, key: str, *rest: Any) -> str:
        if key in names:
            grow(run)
        return send(place, key, *rest)

    monkeypatch.setattr(bucket, "_SINGLE_REQUEST", 1 << 10)
    monkeypatch.setattr(BucketPlace, "create_from", grow_and_send)
    assert library.update_copy(run, THERE).last == 4
    stored = {meta["path"]: meta["size"] for page in obstore.list(user.client, "a/") for meta in page}
    assert {name: stored[f"a/run.chain/{name}"] for name in names} == sizes
    assert library.update_copy(run, THERE).last == 6
    assert ckpt("diff", f"{THERE}@6", f"{RECORDED}@6").code == 0


def test_copy_follows_until_the_run_has_ended(user: StoreServer, run: Path) -> None:
    seen: list[follow.CopyUpdate] = []
    rank = (run / "gradients-0000000003" / "rank-00001.ckg").open("rb")
    fcntl.flock(rank, fcntl.LOCK_EX)  # as a recorder does

    def note(brought: follow.CopyUpdate) -> None:
        seen.append(brought)
        with pytest.raises(LockedError), change(source_path(THERE), Execution()):
            pass  # nobody else changes it
        if len(seen) == 1:
            grow(run)
        else:
            rank.close()

    library.follow_copy(run, THERE, every=0.01, stop=threading.Event(), on_update=note)
    assert [(one.last, one.grows) for one in seen] == [(4, True), (6, True), (6, False)]
    assert not any("/.ckpt/" in key for key in keys(user))


@pytest.mark.slow
def test_copy_has_the_steps_of_a_growing_log_at_each_moment(user: StoreServer, tmp_path: Path) -> None:
    run, seen = tmp_path / "run.chain", set[int]()
    for _ in growing_log.grow(RECORDED, run, seed=1, pieces=8):
        try:
            steps = list(library.Chain(run))
        except CkptError:
            continue  # a rank has no head of its file yet
        if any(not one.stat().st_size for one in run.rglob("*.ckg")):
            continue
        library.update_copy(run, THERE)
        assert list(library.Chain(THERE)) == steps
        if steps[-1] not in seen:
            seen.add(steps[-1])
            assert ckpt("diff", THERE, run).code == 0
    assert len(seen) > 3
    library.copy(THERE, tmp_path / "back")
    assert files(tmp_path / "back") == files(RECORDED)


@pytest.mark.slow
def test_the_command_ends_with_a_signal(user: StoreServer, run: Path) -> None:
    command = [sys.executable, "-m", "ckpt_cli", "copy", str(run), THERE, "--follow", "--every", "0.2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        reports = [json.loads(following.stdout.readline())]
        grow(run)
        while reports[-1]["last"] < 6:
            reports.append(json.loads(following.stdout.readline()))
        following.send_signal(signal.SIGINT)
        assert following.wait(120) == 0
    assert reports[0]["last"] == 4
    assert ckpt("diff", f"{THERE}@6", f"{RECORDED}@6").code == 0
    assert not any("/.ckpt/" in key for key in keys(user))


def test_copy_removes_what_the_chain_dropped_and_uses_what_a_kill_left(
    user: StoreServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def killed(change: follow.ChainChange, chain: chain_file.ChainIndex) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:  # before the list was put
        patch.setattr(follow.ChainChange, "replace", killed)
        with pytest.raises(OutputError):
            library.update_copy(run, THERE)
    left = keys(user)
    assert f"a/run.chain/{chain_file.NAME}" not in left
    assert library.update_copy(run, THERE).objects == 0  # all was there, but for the list
    assert sorted([*left, f"a/run.chain/{chain_file.NAME}"]) == keys(user)
    library.Chain(run).compact(library.Retention(("all",), gradients=1))
    library.update_copy(run, THERE)
    names = {key.split("/")[2] for key in keys(user)}
    assert names == {one.name for one in run.iterdir()} - {"chain.lock"}
    assert ckpt("diff", THERE, run).code == 0


@pytest.mark.slow
def test_copy_follows_a_chain_that_is_compacted_twice_between_two_looks(user: StoreServer, tmp_path: Path) -> None:
    run, looks, stop = tmp_path / "run.chain", list[int](), threading.Event()
    for state in states(4, 100):
        library.Chain(run).append(state)

    def rewrite(update: follow.CopyUpdate) -> None:
        looks.append(update.objects)
        if len(looks) == 1:  # step 3 becomes a delta of step 1, then a base
            for keep in ("1,3,4", "3,4"):
                library.Chain(run).compact(library.Retention((keep,)))
            killed = next((run / "step-0000000003.2").rglob("*.safetensors")).relative_to(run).as_posix()
            obstore.put(user.client, f"a/run.chain/{killed}", b"what another copy had put before it was killed")
            return
        assert ckpt("diff", THERE, run).code == 0
        assert {key.split("/")[2] for key in keys(user)} - {".ckpt"} == {one.name for one in run.iterdir()} - {
            "chain.lock"
        }
        if len(looks) == 2:  # no state is ever written again in its folder
            pack = next((run / "step-0000000004").rglob("*.safetensors"))
            pack.write_bytes(pack.read_bytes()[::-1])

    with pytest.raises(OutputError, match="has other bytes than the chain"):
        library.follow_copy(run, THERE, every=0.01, stop=stop, on_update=rewrite)
    assert len(looks) == 2


@pytest.mark.slow
def test_update_of_a_copy_says_how_to_go_on_after_the_chain_was_cut_back_and_went_on(
    user: StoreServer, tmp_path: Path
) -> None:
    run, before, after = tmp_path / "run.chain", list(states(4, 100)), list(states(4, 7))
    for state in before:
        library.Chain(run).append(state)
    library.update_copy(run, THERE)
    opened = library.Chain(THERE)[3]
    assert ckpt("compact", run, "--upto", 2).code == 0
    for state in after[2:]:
        library.Chain(run).append(state)
    refused = ckpt("copy", run, THERE, "--update")
    advice = f"ckpt compact {THERE} --upto 2"
    assert (refused.code, "step-0000000003" in refused.err, advice in refused.err) == (OUTPUT, True, True), refused
    assert list(library.Chain(THERE)) == [1, 2, 3, 4]
    assert ckpt(*advice.split()[1:]).code == 0
    assert ckpt("copy", run, THERE, "--update").code == 0
    assert ckpt("diff", THERE, run).code == 0
    tensor = next(iter(opened.parameters.values())).weight
    with pytest.raises(CkptError):  # of the old step 3, whose folder has the same name
        tensor[...]


def test_another_chain_is_not_touched(user: StoreServer, run: Path, tmp_path: Path) -> None:
    library.copy(SAMPLES / "universal-1-delta", THERE)
    before = keys(user)
    with pytest.raises(OutputError, match="there is another chain"):
        library.update_copy(run, THERE)
    with pytest.raises(InvalidArgumentError, match="only a copy in a store"):
        library.update_copy(run, tmp_path / "out")
    assert ckpt("copy", run, THERE, "--update", "--dry-run").code == 2
    assert keys(user) == before
    library.update_copy(run, f"{THERE}-2")
    name = next(key for key in keys(user) if key.startswith("a/run.chain-2/") and ".part-" in key)
    obstore.put(user.client, name, b"other bytes")
    with pytest.raises((OutputError, CorruptError)):
        library.update_copy(run, f"{THERE}-2")


def test_parts_after_a_gap_are_not_read(user: StoreServer) -> None:
    name = "a/log.ckg"
    data = bytes(range(250))
    for begin, end in ((0, 100), (100, 170), (170, 200), (220, 250)):
        obstore.put(user.client, part_name(name, begin), data[begin:end])
    folder = source_path(f"s3://{BUCKET}/a")
    assert (folder / "log.ckg").read_bytes() == data[:200]
    assert isinstance(folder, StorePath)
    part = memoryview(bytearray(80))
    assert folder.store.read_into(name, 90, part) == 80
    assert bytes(part) == data[90:170]
    assert folder.store.read_into(name, 195, part) == 5
    shown = [one.name for one in folder.entries()]
    assert shown == ["log.ckg"]
    assert parts_of({part_name(name, 5): 10}) == {}
    assert parts_of({name: 3, part_name(name, 0): 10}) == {}
    assert joined(folder.store, {}) is folder.store
