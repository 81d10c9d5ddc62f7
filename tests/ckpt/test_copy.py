"""Copies of checkpoints and chains as they are: equal bytes between folders and stores, absent or whole."""

import json
import shutil
from pathlib import Path

import numpy as np
import obstore
import pytest
from safetensors.numpy import save_file

import ckpt as library
from ckpt.copying import compare
from ckpt.pipeline import target as life
from ckpt_formats.core.errors import CorruptError, UnsafeError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.seal_checks import verify_seals
from ckpt_formats.core.seals import Leaves, Seal
from ckpt_formats.stores import bucket as buckets
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.e_tags import RunningTag
from damage import BROKEN, SAMPLES, ckpt
from held import flip
from object_stores import BUCKET, StoreServer, faulty, reached, seaweedfs

SOURCES = (
    "dcp-2.2-fsdp1-w2",
    "deepspeed-0.19-zero3-bf16-dp4-tied-frozen",
    "megatron-0.16-tp2-pp2-dist",
    "recorded-1",
    "transformers-5.23-trainer",
    "universal-1-delta",
)
NOT_COPIED = ("truth.safetensors", "expected.json")
ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
CHAIN = SAMPLES / "universal-1-delta"
THERE = f"s3://{BUCKET}/a/copy"


def files(folder: Path) -> dict[str, bytes]:
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def keys(server: StoreServer) -> set[str]:
    return {meta["path"] for page in obstore.list(server.client, "a/") for meta in page}


def expected(name: str) -> dict[str, bytes]:
    return {key: data for key, data in files(SAMPLES / name).items() if key not in NOT_COPIED}


def goes_around(name: str, server: StoreServer, tmp_path: Path) -> None:
    """Into a bucket, to another place there, and back."""
    first = library.copy(SAMPLES / name, f"{THERE}/{name}")
    library.copy(f"{THERE}/{name}", f"{THERE}-2/{name}")
    library.copy(f"{THERE}-2/{name}", tmp_path / "back")
    assert files(tmp_path / "back") == expected(name)
    assert keys(server) == {f"a/{place}/{name}/{key}" for place in ("copy", "copy-2") for key in expected(name)}
    assert first.files == len(expected(name))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.quick(2)
def test_a_sample_goes_into_a_bucket_and_back(name: str, user: StoreServer, tmp_path: Path) -> None:
    goes_around(name, user, tmp_path)


@pytest.mark.slow
def test_another_server_gives_the_same(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with seaweedfs(tmp_path / "data") as server, reached(server):
        goes_around("universal-1-delta", server, tmp_path)


def test_a_delta_is_copied_only_to_where_its_parents_are_beside_it(user: StoreServer, tmp_path: Path) -> None:
    run, values = tmp_path / "run", np.arange(1 << 12, dtype=np.float32)
    (tmp_path / "other").mkdir()
    (tmp_path / "back").mkdir()
    for step in range(3):
        save_file({"w": values + (values % 50 < step)}, whole := tmp_path / "whole.safetensors")
        words = ("diff", run / f"step-{step - 1}", whole, "-o") if step else ("convert", whole)
        run.mkdir(exist_ok=True)
        assert not ckpt(*words, run / f"step-{step}").code
    for place in (tmp_path / "other", THERE):
        for step in (2, 1):
            refused = ckpt("copy", run / f"step-{step}", f"{place}/step-{step}", "--dry-run")
            assert (refused.code, f"{place}/step-0/packs" in refused.err) == (BROKEN, True), refused.err
        for step in range(3):
            library.copy(run / f"step-{step}", f"{place}/step-{step}")
        assert library.diff(library.open(f"{place}/step-2"), library.open(whole)).same
    assert files(tmp_path / "other") == files(run)
    assert not ckpt("diff", f"{THERE}/step-2", whole, "-o", f"{THERE}/step-3").code
    assert library.diff(library.open(f"{THERE}/step-3"), library.open(whole)).same
    for target in (tmp_path / "back", f"{THERE}-of-store"):
        refused = ckpt("copy", f"{THERE}/step-2", f"{target}/step-2")
        assert (refused.code, f"{target}/step-0/packs" in refused.err) == (BROKEN, True), refused.err
        for step in range(3):
            library.copy(f"{THERE}/step-{step}", f"{target}/step-{step}")
        assert library.diff(library.open(f"{target}/step-2"), library.open(whole)).same


def test_a_member_of_a_chain_is_copied_beside_a_copy_of_its_parent(tmp_path: Path) -> None:
    run, values = tmp_path / "run.chain", np.arange(1 << 12, dtype=np.float32)
    for step in range(2):
        save_file({"w": values + (values % 50 < step)}, whole := tmp_path / "whole.safetensors")
        assert not ckpt("append", run, whole, "--step", step).code
    first, second = sorted(one for one in run.iterdir() if one.is_dir())
    (tmp_path / "out").mkdir()
    assert ckpt("copy", second, tmp_path / "out" / second.name).code == BROKEN
    for one in (first, second):
        library.copy(one, tmp_path / "out" / one.name)
    assert library.diff(library.open(tmp_path / "out" / second.name), library.open(whole)).same


def test_copy_names_and_leaves_out_other_files_unless_all_are_requested(tmp_path: Path) -> None:
    planned = ckpt("copy", ZERO1, tmp_path / "out", "--dry-run", "--json")
    plan = json.loads(planned.out)
    assert {one["file"] for one in plan["files"]} == expected(ZERO1.name).keys()
    assert plan["files"][-1]["file"] == "latest"
    assert not (tmp_path / "out").exists()
    done = ckpt("copy", ZERO1, tmp_path / "out")
    assert (done.code, "truth.safetensors" in done.err) == (0, True)
    assert files(tmp_path / "out") == expected(ZERO1.name)
    assert ckpt("copy", ZERO1, tmp_path / "all", "--all").code == 0
    assert files(tmp_path / "all") == files(ZERO1)
    assert ckpt("copy", ZERO1, tmp_path / "all").code == 30


def test_a_single_file(user: StoreServer, tmp_path: Path) -> None:
    model = SAMPLES / "transformers-5.23-trainer" / "model.safetensors"
    assert ckpt("copy", model, f"{THERE}.safetensors").code == 0
    assert ckpt("copy", f"{THERE}.safetensors", tmp_path / "model.safetensors").code == 0
    assert (tmp_path / "model.safetensors").read_bytes() == model.read_bytes()
    assert keys(user) == {"a/copy.safetensors"}


def test_requests_of_a_copy(user: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> object:
            if name in ("get", "put", "list", "head", "delete"):
                requests.append(name)
            return getattr(obstore, name)

    monkeypatch.setattr(buckets, "obstore", Counted())
    library.copy(CHAIN, THERE)
    count = len(expected(CHAIN.name))
    assert (
        requests.count("put") == count + 7
    )  # as for any target: lease, two probes, job, journal, and what was committed
    assert len(requests) <= count + 25


def test_an_interrupted_copy_goes_on(user: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(point: life.Point) -> None:
        if point == "settled":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", interrupt)
        assert ckpt("copy", CHAIN, THERE).code == 130
    assert ckpt("inspect", THERE).code == 20
    assert "a/copy/chain.json" not in keys(user)
    done = json.loads(ckpt("copy", CHAIN, THERE, "--json").out)
    assert done["resumed_files"] == sum(not key.endswith(("chain.json", "manifest.json")) for key in files(CHAIN))
    assert ckpt("verify", THERE).code == 0


@pytest.mark.parametrize("target", ["local", "store"])
def test_a_damaged_source_is_not_copied(target: str, user: StoreServer, tmp_path: Path) -> None:
    shutil.copytree(CHAIN, tmp_path / "source")
    flip(max((tmp_path / "source").rglob("*.safetensors"), key=lambda one: one.stat().st_size), 5000)
    done = ckpt("copy", tmp_path / "source", THERE if target == "store" else tmp_path / "out")
    assert done.code == 20
    assert "checksum" in done.err
    assert not (tmp_path / "out").exists()
    assert keys(user) == set()


def test_a_store_that_names_objects_otherwise_is_read_back(user: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has other bytes there is found, before anything is published."""
    read = list[str]()
    of = compare.digest_of

    def noted(path: Path) -> int:
        read.append(path.name)
        return of(path)

    monkeypatch.setattr(compare, "digest_of", noted)
    monkeypatch.setattr(RunningTag, "text", lambda self: "another")
    library.copy(CHAIN, THERE)
    assert sorted(read) == sorted(key.rpartition("/")[2] for key in files(CHAIN))
    upload = Bucket.upload

    def careless(self: Bucket, key: str, file: Path, *rest: object) -> str:
        (damaged := file.with_name(f"{file.name}.damaged")).write_bytes(file.read_bytes()[:-1] + b"?")
        return upload(self, key, damaged, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Bucket, "upload", careless)
    with pytest.raises(CorruptError, match="other bytes"):
        library.copy(SAMPLES / "universal-1-plain", f"{THERE}-2")
    assert not any(key.startswith("a/copy-2/") for key in keys(user))


@pytest.mark.parametrize("nbytes", [0, 100, 5 << 20, (5 << 20) + 1, (12 << 20) + 7])
def test_the_tag_of_an_object_is_foretold(
    nbytes: int, user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_SINGLE_REQUEST", 4 << 20)
    monkeypatch.setattr(buckets, "_PART", 5 << 20)
    data = bytes(range(251)) * (nbytes // 251 + 1)
    (tmp_path / "file").write_bytes(data[:nbytes])
    tag = RunningTag(buckets.part_nbytes(nbytes))
    for begin in range(0, nbytes, 1 << 20):
        tag.update(memoryview(data)[begin : min(begin + (1 << 20), nbytes)])
    e_tag = Bucket(f"s3://{BUCKET}").upload("a/file", tmp_path / "file", lambda: None)
    assert e_tag.strip('"') == tag.text()


def test_a_store_that_fails_now_and_then_gets_the_same_bytes(user: StoreServer, tmp_path: Path) -> None:
    """One of twenty requests is answered with 500, 503, a reset, half of the bytes, or not at all."""
    with faulty(user, 0.05, seed=4, writes=True) as (proxy, faults), reached(proxy):
        library.copy(SAMPLES / "universal-1-coded", THERE)
        library.copy(THERE, tmp_path / "back")
    assert sum(faults.values()) > 3, faults
    assert files(tmp_path / "back") == expected("universal-1-coded")


def test_a_chain_to_which_a_run_appends_is_copied_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CHAIN, tmp_path / "run.chain")
    run, appended = library.Chain(tmp_path / "run.chain"), list[int]()
    before = list(run)
    library.save(library.open(CHAIN), tmp_path / "state", library.Universal())

    def append(point: life.Point) -> None:
        if point == "settled" and not appended:
            appended.append(before[-1] + 1)
            run.append(library.open(tmp_path / "state"), step=appended[0])

    monkeypatch.setattr(life, "reached", append)
    library.copy(tmp_path / "run.chain", tmp_path / "copy.chain")
    assert list(run) == [*before, *appended]
    assert list(library.Chain(tmp_path / "copy.chain")) == before
    assert files(tmp_path / "copy.chain") == expected(CHAIN.name)


def test_copy_of_a_growing_log_has_its_complete_records(tmp_path: Path) -> None:
    source = SAMPLES / "recorded-1" / "run.chain"
    shutil.copytree(source, tmp_path / "run.chain")
    rank = next((tmp_path / "run.chain").glob("gradients-0000000003/rank-00000.ckg"))
    whole = rank.read_bytes()
    rank.write_bytes(whole + whole[-30:])  # a record that is being written
    library.copy(tmp_path / "run.chain", tmp_path / "copy.chain")
    grows = json.loads(ckpt("log", "--json", source).out)["segments"][-1]
    copied = files(tmp_path / "copy.chain")
    name = rank.relative_to(tmp_path / "run.chain").as_posix()
    assert copied[name] == (whole if grows["last"] is None or not grows.get("ended") else whole + whole[-30:])
    assert ckpt("verify", tmp_path / "copy.chain").code == 0


def test_names_that_would_leave_the_target_are_refused(user: StoreServer, tmp_path: Path) -> None:
    from ckpt.copying.selection import below
    from ckpt_formats.core.store_path import StorePath
    from ckpt_formats.stores.object_store import ObjectStore, StoredObject

    objects = {f"a/{name}": StoredObject(1, "tag", 0.0) for name in ("one", "../two")}
    store = ObjectStore(f"s3://{BUCKET}", objects, "a")
    with pytest.raises(UnsafeError, match="no file can have the name"):
        list(below(StorePath(store, "a")))


def test_chunks_of_several_lengths_are_checked_as_they_pass(tmp_path: Path) -> None:
    import numpy as np
    import xxhash

    data = bytes(range(256)) * 40
    lengths = np.array([100, 0, 5000, len(data) - 5100], np.int64)
    ends = np.cumsum(lengths).tolist()
    digests = b"".join(xxhash.xxh3_64_digest(data[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True))
    (tmp_path / "file").write_bytes(data)

    def is_valid(passed: bytes) -> bool:
        whole = xxhash.xxh3_128_intdigest(digests)
        seal = Seal(tmp_path / "file", 0, len(data), "xxh3-64", whole, "x", 0, Leaves(lengths, digests))
        with Reader() as reader:
            for begin in range(0, len(passed), 777):
                reader.note_sealed(seal, begin, memoryview(passed)[begin : begin + 777])
            return not list(verify_seals([reader.evidence()], Reader(check=False)))

    assert is_valid(data)
    assert not is_valid(data[:6000] + b"?" + data[6001:])
    assert is_valid(data[:4000])  # a part is no evidence: the rest is read
