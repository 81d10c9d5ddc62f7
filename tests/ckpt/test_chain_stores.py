"""Chains in a bucket: the same members as in a folder, by few requests; one changes it at a time; killed, whole."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pytest

import ckpt as library
from ckpt.chains import write
from ckpt.chains.change import change
from ckpt.pipeline import Execution, scratch
from ckpt.pipeline import target as life
from ckpt_formats.core.errors import (
    CkptError,
    IncompleteError,
    LockedError,
    NotFoundError,
    OutputError,
    UnsupportedError,
)
from ckpt_formats.stores import bucket as buckets
from ckpt_formats.stores import object_store
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex
from damage import SAMPLES, ckpt
from held import states
from object_stores import BUCKET, StoreServer, faulty, reached, seaweedfs, unconditional

ELEMENTS = 4_000
THERE = f"s3://{BUCKET}/a/run.chain"
KEPT = library.Retention(("2,4",))
BUDGETS = {
    "append a base": {"put": 12, "get": 7, "list": 9, "head": 2, "delete": 4},
    "append a delta": {"put": 12, "get": 14, "list": 9, "delete": 6},
    "append with a tip": {"put": 20, "get": 18, "list": 14, "delete": 7},
    "verify": {"get": 13, "list": 1},
    "restore": {"get": 10, "list": 1},
    "compact": {"put": 20, "get": 34, "list": 22, "delete": 9},
}
"""Requests at most, for states of one pack. One delta takes three objects; each job has a lease, a probe, a journal."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four states of a run, and in `run.chain` beside them the chain of all."""
    at = tmp_path_factory.mktemp("saved")
    paths = [at / f"state{step}" for step in range(1, 5)]
    for path, state in zip(paths, states(4, ELEMENTS), strict=True):
        library.save(state, path, library.Universal())
        library.Chain(at / "run.chain").append(library.open(path))
    return paths


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts = Counter[str]()

    class Counted:
        def __getattr__(self, name: str) -> object:
            if name in ("get", "put", "list", "list_with_delimiter", "head", "delete"):
                counts[name.removesuffix("_with_delimiter")] += 1
            return getattr(obstore, name)

    monkeypatch.setattr(buckets, "obstore", Counted())
    monkeypatch.setattr(object_store, "obstore", Counted())
    return counts


def objects(server: StoreServer) -> dict[str, bytes]:
    names = [meta["path"] for page in obstore.list(server.client, "a/run.chain/") for meta in page]
    return {path[len("a/run.chain/") :]: bytes(obstore.get(server.client, path).bytes()) for path in names}


def files(folder: Path) -> dict[str, bytes]:
    paths = (one for one in folder.rglob("*") if one.is_file() and one.name != "chain.lock")
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in paths}


@pytest.mark.slow
def test_a_process_whose_lease_another_one_has_taken_removes_no_folder(user: StoreServer, saved: list[Path]) -> None:
    library.Chain(THERE).append(library.open(saved[0]))
    (first,) = chain_file.read(target_path(THERE)).members
    later = replace(first, folder="step-0000000009", step=9)
    with change(target_path(THERE), Execution(workers=1)) as changed:
        listed = chain_file.dump(ChainIndex((replace(first, time="2026-01-01T00:00:00Z"),)))
        others = {".ckpt/lease": b"{}", "chain.json": listed, f"{later.folder}/index.json": b"{}"}
        for name, data in others.items():  # what the other process writes
            obstore.put(user.client, f"a/run.chain/{name}", data)
        with pytest.raises(LockedError, match="has changed"):
            changed.add(ChainIndex((first, later)), later.folder)
    assert f"{later.folder}/index.json" in objects(user)
    assert objects(user)["chain.json"] == listed
    obstore.delete(user.client, "a/run.chain/.ckpt/lease")
    with change(target_path(THERE), Execution(workers=1)) as changed:
        changed.replace(ChainIndex((first,)))
        obstore.put(user.client, "a/run.chain/.ckpt/lease", b"{}")
        with pytest.raises(LockedError, match="renew its lease"):
            changed.confirm()
        with pytest.raises(LockedError, match="renew its lease"):
            changed.remove([changed.run / later.folder])
    assert f"{later.folder}/index.json" in objects(user)


def assert_equal(there: dict[str, bytes], here: dict[str, bytes]) -> None:
    """The same files, and the same list but for times and where the last state was appended from."""
    lists = [chain_file.parse(one.pop(chain_file.NAME), Path(chain_file.NAME)) for one in (there, here)]
    assert there == here
    timeless = [[replace(member, time="") for member in one.members] for one in lists]
    assert timeless[0] == timeless[1]


def appended(saved: list[Path], count: int) -> library.Chain:
    run = library.Chain(THERE)
    for path in saved[:count]:
        run.append(library.open(path))
    return run


def goes_through(server: StoreServer, saved: list[Path], tmp_path: Path, requests: Counter[str]) -> None:
    """Appended, verified, restored and compacted, there as here, within the budgets."""
    here, there = library.Chain(tmp_path / "run.chain"), library.Chain(THERE)

    def within(what: str) -> None:
        assert not requests - Counter(BUDGETS[what]), (what, requests)
        requests.clear()

    for number, path in enumerate(saved):
        policy = library.DeltaPolicy(tip=number == 2)
        here.append(library.open(path), policy)
        there.append(library.open(path), policy)
        within("append a base" if not number else "append with a tip" if number == 2 else "append a delta")
    assert_equal(objects(server), files(tmp_path / "run.chain"))
    assert list(there) == [1, 2, 3, 4]
    requests.clear()
    assert there.verify().bad_steps == ()
    within("verify")
    for format, name in ((library.Universal(), "one"), (library.Torch(), "one.pt")):
        for run, place in ((here, tmp_path / f"here-{name}"), (there, tmp_path / f"there-{name}")):
            requests.clear()
            run.restore(3, place, format)
        within("restore")
    assert files(tmp_path / "there-one") == files(tmp_path / "here-one")
    assert (tmp_path / "there-one.pt").read_bytes() == (tmp_path / "here-one.pt").read_bytes()
    here.compact(KEPT)
    there.compact(KEPT)
    within("compact")
    assert_equal(objects(server), files(tmp_path / "run.chain"))


@pytest.mark.slow
def test_a_chain_in_a_bucket_has_the_members_of_a_local_one(
    user: StoreServer, saved: list[Path], tmp_path: Path, requests: Counter[str]
) -> None:
    goes_through(user, saved, tmp_path, requests)


@pytest.mark.slow
def test_another_server_gives_the_same(saved: list[Path], tmp_path: Path, requests: Counter[str]) -> None:
    (tmp_path / "data").mkdir()
    with seaweedfs(tmp_path / "data") as server, reached(server):
        goes_through(server, saved, tmp_path, requests)


def test_the_commands_take_a_chain_in_a_bucket(user: StoreServer, saved: list[Path], tmp_path: Path) -> None:
    for path in saved[:2]:
        done = ckpt("append", THERE, path, "--json")
        assert done.code == 0, done.out
    assert json.loads(ckpt("append", THERE, saved[2], "--dry-run", "--json").out)["step"] == 3
    assert [one["step"] for one in json.loads(ckpt("log", THERE, "--json").out)["steps"]] == [1, 2]
    restored = ckpt("restore", THERE, f"s3://{BUCKET}/a/restored", "--step", "2", "--to", "torch")
    assert restored.code == 0, restored.err
    assert ckpt("diff", f"{THERE}@2", saved[1]).code == 0
    compacted = ckpt("compact", THERE, "--keep", "last:1", "--json")
    assert compacted.code == 0, compacted.out
    assert [member.step for member in library.Chain(THERE).index.members] == [2]
    assert ckpt("inspect", THERE).code == 0


def test_a_last_state_in_the_same_bucket_is_read_again_not_replayed(user: StoreServer, saved: list[Path]) -> None:
    for path in saved[:2]:
        library.copy(path, f"s3://{BUCKET}/a/{path.name}")
    run = library.Chain(THERE)
    for path in saved[:2]:
        run.append(library.open(f"s3://{BUCKET}/a/{path.name}"))
    noted = run.index.appended_from
    assert noted is not None
    assert noted.path == "../state2"
    opened = list[object]()
    original = write.write_delta

    def spied(*given: object, **named: object) -> object:
        opened.append(given[3].path)  # type: ignore[attr-defined]
        return original(*given, **named)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.chains.append.write_delta", spied)
        patch.setattr("ckpt.chains.state_before.open_member", None)  # nothing is replayed
        run.append(library.open(saved[2]))
    assert len(opened) == 1


def test_append_fails_when_another_append_won(
    user: StoreServer, saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, errors = appended(saved, 2), list[CkptError]()

    def append_too(point: life.Point) -> None:
        if point == "settled" and not errors:
            errors.append(OutputError("nothing"))
            with pytest.raises(LockedError, match="another process is changing") as refused:
                library.Chain(THERE).append(library.open(saved[3]))
            errors.append(refused.value)

    monkeypatch.setattr(life, "reached", append_too)
    run.append(library.open(saved[2]))
    assert len(errors) == 2
    assert list(run) == [1, 2, 3]
    run.append(library.open(saved[3]))  # and goes on after it
    assert all(one.kind == "copy" for one in run.verify())


def test_a_list_that_another_has_replaced_is_not_overwritten(
    user: StoreServer, saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a process that was taken for dead, and was not."""
    run, done = appended(saved, 2), list[int]()
    first, last = run.index.members
    other = chain_file.dump(replace(run.index, members=(first, replace(last, time="2026-01-01T00:00:00Z"))))

    def replace_list(point: life.Point) -> None:
        if point == "renamed" and not done:
            done.append(1)
            obstore.put(user.client, "a/run.chain/chain.json", other)

    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", replace_list)
        with pytest.raises(LockedError, match="has changed this chain meanwhile"):
            run.append(library.open(saved[2]))
    assert objects(user)["chain.json"] == other
    assert list(run) == [1, 2]
    again = run.append(library.open(saved[2]))
    assert any("removed step-0000000003" in str(note) for note in again.notes)
    assert not any("/.ckpt/" in key for key in objects(user))


def test_a_list_that_is_replaced_while_the_chain_is_opened_is_read_again(
    user: StoreServer, saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, listed, done = appended(saved, 3), object_store.listed, list[int]()
    shorter = chain_file.dump(replace(run.index, members=run.index.members[:2]))

    def then_replaced(*given: Any) -> Any:
        result = listed(*given)
        if not done:
            done.append(1)
            obstore.put(user.client, "a/run.chain/chain.json", shorter)
        return result

    monkeypatch.setattr(object_store, "listed", then_replaced)
    assert list(run) == [1, 2]


def test_a_scratch_folder_that_another_process_sweeps_at_once_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, done = scratch.lock, list[Path]()

    def swept(file: Path, *given: Any, **named: Any) -> Any:
        if not done:
            done.append(file)
            shutil.rmtree(file.parent)
            raise LockedError("swept")
        return lock(file, *given, **named)

    monkeypatch.setattr(scratch, "lock", swept)
    with scratch.scratch_folder(tmp_path) as folder:
        assert folder.is_dir()
        assert folder.parent != done[0].parent
    assert list(tmp_path.iterdir()) == []


def test_append_refuses_places_that_cannot_be_a_chain(user: StoreServer, saved: list[Path], tmp_path: Path) -> None:
    appended(saved, 1)
    before = objects(user)
    with unconditional(user) as careless, reached(careless), pytest.raises(OutputError, match="ignores"):
        library.Chain(THERE).append(library.open(saved[1]))
    with pytest.raises(UnsupportedError, match="one file system, or in one bucket"):
        write._parent(library.Chain(THERE).path, "", tmp_path / "delta")
    with pytest.raises(NotFoundError, match="not a chain"):
        library.Chain(f"s3://{BUCKET}/a").compact(KEPT)
    with pytest.raises(OutputError, match="is not a chain, and contains"):
        library.Chain(f"s3://{BUCKET}/a").append(library.open(saved[0]))
    with pytest.raises(OutputError, match="is a bucket"):
        library.Chain(f"s3://{BUCKET}").append(library.open(saved[0]))
    Bucket(f"s3://{BUCKET}").create("a/other.chain/.ckpt/job", b"{}")
    with pytest.raises(IncompleteError, match="was interrupted"):
        library.Chain(f"s3://{BUCKET}/a/other.chain").append(library.open(saved[0]))
    assert objects(user) == before


def test_a_store_that_fails_now_and_then_gets_the_same_members(
    user: StoreServer, saved: list[Path], tmp_path: Path
) -> None:
    """One of twenty requests is answered with 500, 503, a reset, half of the bytes, or not at all."""
    with faulty(user, 0.05, seed=2, writes=True) as (proxy, faults), reached(proxy):
        appended(saved, 4).compact(KEPT)
    assert sum(faults.values()) > 5, faults
    shutil.copytree(saved[0].parent / "run.chain", tmp_path / "run.chain")
    library.Chain(tmp_path / "run.chain").compact(KEPT)
    assert_equal(objects(user), files(tmp_path / "run.chain"))


def test_a_recorded_run_in_a_bucket_is_compacted(user: StoreServer, tmp_path: Path) -> None:
    source = SAMPLES / "recorded-1" / "run.chain"
    library.copy(source, THERE)
    shutil.copytree(source, tmp_path / "run.chain")
    for run in (library.Chain(THERE), library.Chain(tmp_path / "run.chain")):
        run.compact(library.Retention(("all",), upto=4))
    for step in list(library.Chain(tmp_path / "run.chain")):
        assert ckpt("diff", f"{THERE}@{step}", f"{tmp_path / 'run.chain'}@{step}").code == 0
