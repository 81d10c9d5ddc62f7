"""Checkpoints that are written into buckets: equal to local ones, absent or whole, one writer, few requests."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError

import ckpt as library
from ckpt.pipeline import Execution, bucket_target, lease
from ckpt.pipeline import target as life
from ckpt.pipeline.lease_owner import LeaseOwner, this_machine
from ckpt_formats.core.errors import LockedError, OutputError
from ckpt_formats.stores import bucket as buckets
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.bucket_place import BucketPlace
from ckpt_formats.stores.location import target_path
from damage import SAMPLES, ckpt
from object_stores import BUCKET, StoreServer, faulty, reached, seaweedfs, unconditional

ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
PLAIN = SAMPLES / "universal-1-plain"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests of what writes: `get`, `put`, `list`, `head`, `delete`."""
    counted: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> object:
            if name in ("get", "put", "list", "head", "delete"):
                counted.append(name)
            return getattr(obstore, name)

    monkeypatch.setattr(buckets, "obstore", Counted())
    return counted


def objects_below(server: StoreServer, key: str) -> dict[str, bytes]:
    metas = [meta for page in obstore.list(server.client, f"{key}/") for meta in page]
    return {m["path"][len(key) + 1 :]: bytes(obstore.get(server.client, m["path"]).bytes()) for m in metas}


def files_below(folder: Path) -> dict[str, bytes]:
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


TARGETS = (
    ("convert", ZERO1, ()),
    ("convert", ZERO1, ("--pack-size", "64K")),
    ("convert", SAMPLES / "dcp-2.13-fsdp2-w2", ("--to", "deepspeed", "--dp", "3")),
    ("convert", SAMPLES / "megatron-0.16-tp2-pp2-dist", ("--to", "dcp")),
    ("convert", ZERO1, ("--to", "deepspeed-universal")),
    ("convert", SAMPLES / "transformers-5.23-trainer", ("--to", "hf")),
    ("reshard", SAMPLES / "megatron-0.16-tp2-pp2-dist", ("--tp", "4")),
    ("reshard", SAMPLES / "megatron-0.16-tp2-pp2-legacy", ("--pp", "1")),
    ("compress", ZERO1, ()),
)


@pytest.mark.parametrize(
    ("command", "source", "options"), TARGETS, ids=lambda value: getattr(value, "name", str(value))
)
def test_a_folder_in_a_store_has_the_bytes_of_a_local_one(
    command: str,
    source: Path,
    options: tuple[str, ...],
    user: StoreServer,
    tmp_path: Path,
    requests: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BucketPlace, "batch_seconds", 1e9)  # a slow machine would put more
    local = ckpt(command, source, tmp_path / "out", *options)
    stored = ckpt(command, source, f"s3://{BUCKET}/a/out", *options)
    assert (stored.code, stored.err.replace(f"s3://{BUCKET}/a", str(tmp_path))[:40]) == (local.code, local.err[:40])
    assert local.code == 0, local.err
    expected = files_below(tmp_path / "out")
    assert objects_below(user, "a/out") == expected
    # One PUT for each file; the rest are the lease, which is tried for both conditions, the job, the journal, the end.
    journal = -(-len(expected) // 64)
    assert requests.count("put") == len(expected) + 6 + journal
    assert len(requests) - requests.count("put") <= 20
    assert ckpt("verify", f"s3://{BUCKET}/a/out").code == 0


@pytest.mark.slow
def test_every_sample_is_written_to_another_server(tmp_path: Path) -> None:
    """From the disk, and from what was written: each with the bytes of a local folder."""
    (tmp_path / "data").mkdir()
    with seaweedfs(tmp_path / "data") as server, reached(server):
        for name in sorted(path.name for path in SAMPLES.iterdir() if path.is_dir() and path.name != "damaged"):
            source, url = SAMPLES / name, f"s3://{BUCKET}/{name}"
            first = ckpt("convert", source, f"{url}/universal", "--pack-size", "64K")
            assert first.code == 0, first.err
            assert ckpt("convert", source, tmp_path / name, "--pack-size", "64K").code == 0
            assert objects_below(server, f"{name}/universal") == files_below(tmp_path / name)
            again = ckpt("convert", f"{url}/universal", f"{url}/again", "--to", "safetensors", "--shard-size", "64K")
            assert again.code == 0, again.err
            options = ("--to", "safetensors", "--shard-size", "64K")
            assert ckpt("convert", tmp_path / name, tmp_path / f"{name}-again", *options).code == 0
            assert objects_below(server, f"{name}/again") == files_below(tmp_path / f"{name}-again")


@pytest.mark.parametrize("name", ["one.pt", "one.safetensors", "one.ucp"])
def test_a_single_file_in_a_store_has_the_bytes_of_a_local_one(name: str, user: StoreServer, tmp_path: Path) -> None:
    to = {"one.pt": ("--to", "torch"), "one.safetensors": ("--to", "safetensors")}.get(name, ())
    assert ckpt("convert", PLAIN, tmp_path / name, *to).code == 0
    done = ckpt("convert", PLAIN, f"s3://{BUCKET}/a/{name}", *to)
    assert done.code == 0, done.err
    assert objects_below(user, "a") == {name: (tmp_path / name).read_bytes()}
    again = ckpt("convert", PLAIN, f"s3://{BUCKET}/a/{name}", *to)
    assert again.code == 30
    assert "exists already" in again.err


def test_a_large_file_is_uploaded_in_parts(user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_SINGLE_REQUEST", 1 << 20)
    data = bytes(range(256)) * (80 << 10)
    (tmp_path / "large").write_bytes(data)
    bucket, checks = Bucket(f"s3://{BUCKET}"), []
    e_tag = bucket.upload("large", tmp_path / "large", lambda: checks.append(1))
    assert e_tag == bucket.list("")["large"].e_tag
    assert checks == [1]
    assert bytes(obstore.get(user.client, "large").bytes()) == data

    def lost() -> None:
        raise LockedError("the lease was lost")

    with pytest.raises(LockedError):
        bucket.upload("other", tmp_path / "large", lost)
    assert bucket.head("other") is None


@pytest.mark.parametrize("point", ["written", "journalled", "settled", "committed", "before rename"])
def test_interrupted_target_is_no_checkpoint_and_can_be_continued(
    point: life.Point, user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = f"s3://{BUCKET}/a/out", ("--to", "deepspeed", "--dp", "3")
    assert ckpt("convert", ZERO1, tmp_path / "out", *options).code == 0

    def interrupt(reached: life.Point) -> None:
        if reached == point:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", interrupt)
        assert ckpt("convert", ZERO1, url, *options).code == 130
    refused = ckpt("inspect", url)
    assert refused.code == 20
    assert "ckpt clean" in refused.err
    done = ckpt("convert", ZERO1, url, *options, "--json")
    assert done.code == 0, done.out
    assert objects_below(user, "a/out") == files_below(tmp_path / "out")
    if point not in ("written", "journalled"):
        assert json.loads(done.out)["resumed_files"] == 4


def test_target_is_whole_when_it_is_interrupted_after_its_last_file(
    user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/a/out"
    assert ckpt("convert", ZERO1, tmp_path / "out").code == 0

    def interrupt(reached: life.Point) -> None:
        if reached == "renamed":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", interrupt)
        assert ckpt("convert", ZERO1, url).code == 130
    assert ckpt("verify", url).code == 0
    again = ckpt("convert", ZERO1, url)
    assert (again.code, "exists already" in again.err) == (30, True)
    assert objects_below(user, "a/out") == files_below(tmp_path / "out")


def test_clean_gives_up(user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}/a/out"
    user.put("a/other", PLAIN / "manifest.json")

    def interrupt(reached: life.Point) -> None:
        if reached == "committed":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", interrupt)
        assert ckpt("convert", ZERO1, url).code == 130
        assert ckpt("convert", ZERO1, tmp_path / "out").code == 130
    assert objects_below(user, "a/out")
    for target in (url, tmp_path / "out"):
        removed = json.loads(ckpt("clean", target, "--json").out)
        assert removed["files"] > 1
        assert json.loads(ckpt("clean", target, "--json").out)["files"] == 0
    assert objects_below(user, "a") == {"other": (PLAIN / "manifest.json").read_bytes()}
    assert not list(tmp_path.iterdir())
    assert ckpt("convert", ZERO1, url).code == 0
    assert ckpt("clean", url).code == 0
    assert ckpt("verify", url).code == 0


def test_uploads_that_were_not_completed_are_aborted(user: StoreServer) -> None:
    boto3 = pytest.importorskip("boto3")
    with closing(boto3.client("s3", region_name="us-east-1")) as client:
        for key in ("a/out/x", "a/other/x"):
            client.create_multipart_upload(Bucket=BUCKET, Key=key)
        done = ckpt("clean", f"s3://{BUCKET}/a/out", "--json")
        assert json.loads(done.out)["uploads"] == 1
        assert [one["Key"] for one in client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]] == ["a/other/x"]


def test_another_job_removes_what_the_first_has_left(
    user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/a/out"

    def interrupt(reached: life.Point) -> None:
        if reached == "settled":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", interrupt)
        assert ckpt("convert", ZERO1, url, "--to", "deepspeed").code == 130
    assert ckpt("convert", ZERO1, url).code == 0
    assert ckpt("convert", ZERO1, tmp_path / "out").code == 0
    assert objects_below(user, "a/out") == files_below(tmp_path / "out")


def test_objects_of_others_are_never_touched(user: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}/a/out"
    user.put("a/out/notes.txt", PLAIN / "manifest.json")
    before = objects_below(user, "a")
    refused = ckpt("convert", ZERO1, url)
    assert refused.code == 30
    assert objects_below(user, "a") == before
    obstore.delete(user.client, "a/out/notes.txt")

    def intrude(reached: life.Point) -> None:
        if reached == "written":
            user.put("a/out/notes.txt", PLAIN / "manifest.json")

    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", intrude)
        refused = ckpt("convert", ZERO1, url)
    assert refused.code == 30
    assert "notes.txt" in refused.err
    assert ckpt("clean", url).code == 0
    assert objects_below(user, "a") == before


def test_a_lease_lets_one_process_write(user: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, key = Bucket(f"s3://{BUCKET}"), "a/out/.ckpt/lease"
    notes = BucketPlace(bucket, "a/out/.ckpt")
    with lease.hold(notes, "lease", "the target") as first:
        first.check()
        with pytest.raises(LockedError, match="process"), lease.hold(notes, "lease", "the target"):
            pass
        refused = ckpt("convert", ZERO1, f"s3://{BUCKET}/a/out")
        assert refused.code == 11
    assert bucket.read(key) is None

    # The owner is on another machine, and has been silent for longer than it promised.
    owner = LeaseOwner("id", "elsewhere", "another machine", 1, "1", 0.5)
    bucket.create(key, lease._body(owner))
    refused = ckpt("convert", ZERO1, f"s3://{BUCKET}/a/out")
    if refused.code == 11:  # the clock of the store counts seconds
        assert "elsewhere" in refused.err
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "now", lambda self, folder: self.head(key).modified + 1)
        with lease.hold(notes, "lease", "the target") as taken:
            taken.check()
    # The owner was a process of this machine that has ended.
    dead = LeaseOwner("id", "here", this_machine(), 2**22 + 1, "1", 3600.0)
    bucket.create(key, lease._body(dead))
    with lease.hold(notes, "lease", "the target"):
        pass


def test_a_lease_that_was_taken_over_ends_the_work(user: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SECONDS", 0.6)
    url = f"s3://{BUCKET}/a/out"

    there = set[str]()

    def take_over(reached: life.Point) -> None:
        if reached == "committed":
            there.update(objects_below(user, "a/out"))
            obstore.put(user.client, "a/out/.ckpt/lease", b"{}")
            import time

            time.sleep(0.5)

    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", take_over)
        refused = ckpt("convert", ZERO1, url)
    assert refused.code == 11
    assert objects_below(user, "a/out").keys() == there


@pytest.mark.slow
def test_a_large_file_is_there_although_the_answer_to_the_end_of_its_upload_was_lost(
    user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = list[str]()

    class Losing:
        def __getattr__(self, name: str) -> object:
            return getattr(obstore, name)

        def put(self, client: object, key: str, *arguments: object, **options: object) -> object:
            answer = obstore.put(client, key, *arguments, **options)  # type: ignore[call-overload]
            if options["use_multipart"] and key not in lost:
                lost.append(key)
                raise GenericError("no answer")
            return answer

    monkeypatch.setattr(buckets, "_SINGLE_REQUEST", 1 << 10)
    monkeypatch.setattr(buckets, "obstore", Losing())
    assert ckpt("convert", ZERO1, tmp_path / "out.ucp").code == 0
    done = ckpt("convert", ZERO1, f"s3://{BUCKET}/a/out.ucp")
    assert done.code == 0, done.err
    assert lost == ["a/out.ucp"]
    assert objects_below(user, "a") == {"out.ucp": (tmp_path / "out.ucp").read_bytes()}


@pytest.mark.slow
def test_a_process_whose_lease_was_taken_over_deletes_nothing(user: StoreServer) -> None:
    """It does not know yet: it renews its lease in a while. What is there may be what the other one has published."""
    url = f"s3://{BUCKET}/a/out"
    assert ckpt("convert", PLAIN, url).code == 0
    obstore.put(user.client, "a/out/.ckpt/job", json.dumps({"files": list(files_below(PLAIN))}).encode())
    obstore.delete(user.client, "a/out/manifest.json")
    before = objects_below(user, "a/out")
    with bucket_target.open_target(target_path(url), Execution(), None) as stage:
        obstore.put(user.client, "a/out/.ckpt/lease", b"{}")
        with pytest.raises(LockedError):
            stage.remove()
    assert objects_below(user, "a/out") == {**before, ".ckpt/lease": b"{}"}
    assert ckpt("clean", url).code == 11
    obstore.delete(user.client, "a/out/.ckpt/lease")
    assert ckpt("clean", url).code == 0
    assert objects_below(user, "a/out") == {}


@pytest.mark.slow
def test_an_object_that_somebody_has_replaced_is_noticed_before_the_target_appears(
    user: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(point: life.Point) -> None:
        if point == "committed":
            obstore.put(user.client, "a/out/packs/00000.safetensors", b"other")

    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", damage)
        refused = ckpt("convert", PLAIN, f"s3://{BUCKET}/a/out")
    assert (refused.code, "as it has acknowledged it" in refused.err) == (30, True)
    assert "manifest.json" not in objects_below(user, "a/out")


def test_a_store_that_ignores_conditions_is_refused(server: StoreServer, tmp_path: Path) -> None:
    with unconditional(server) as careless, reached(careless):
        url = f"s3://{BUCKET}/b/out"
        refused = ckpt("convert", ZERO1, url)
        assert refused.code == 30
        assert "If-None-Match" in refused.err
        assert objects_below(careless, "b/out") == {}
        assert ckpt("convert", ZERO1, url, "--no-lock").code == 0
        assert ckpt("verify", url).code == 0


def test_faults_of_the_store_change_no_byte(server: StoreServer, tmp_path: Path) -> None:
    options = ("--to", "deepspeed", "--dp", "3")
    assert ckpt("convert", ZERO1, tmp_path / "out", *options).code == 0
    with faulty(server, 0.15, seed=5, writes=True) as (fragile, faults), reached(fragile):
        done = ckpt("convert", ZERO1, f"s3://{BUCKET}/c/out", *options)
        assert done.code == 0, done.err
    assert sum(faults.values()) > 3
    assert objects_below(server, "c/out") == files_below(tmp_path / "out")


def test_a_damaged_source_leaves_nothing(user: StoreServer, tmp_path: Path) -> None:
    shutil.copytree(ZERO1, tmp_path / "source")
    file = next((tmp_path / "source").rglob("*model_states.pt"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert ckpt("convert", tmp_path / "source", f"s3://{BUCKET}/a/out").code == 20
    assert objects_below(user, "a") == {}


@pytest.mark.parametrize("content", [b"", b"[]", b"{\xff", b'{"id": 1, "files": [[1], "../../x"]}', b"0" * 100_000])
def test_a_strange_job_in_the_store_harms_nothing(content: bytes, user: StoreServer) -> None:
    obstore.put(user.client, "a/out/.ckpt/job", content)
    obstore.put(user.client, "a/x", b"of somebody else")
    assert ckpt("inspect", f"s3://{BUCKET}/a/out").code == 20
    assert ckpt("convert", ZERO1, f"s3://{BUCKET}/a/out").code == 0
    assert ckpt("verify", f"s3://{BUCKET}/a/out").code == 0
    assert objects_below(user, "a")["x"] == b"of somebody else"


def test_the_library_writes_to_a_url(user: StoreServer) -> None:
    source = library.open(PLAIN)
    result = library.save(source, f"s3://{BUCKET}/a/out", library.Universal())
    assert str(result.target) == f"s3://{BUCKET}/a/out"
    assert list(library.open(result.target)) == list(source)
    with pytest.raises(OutputError, match="exists"):
        library.save(source, f"s3://{BUCKET}/a/out", library.Universal())
    with pytest.raises(OutputError, match="is a bucket"):
        library.save(source, f"s3://{BUCKET}", library.Universal())
    with pytest.raises(OutputError, match="inside the source"):
        library.save(library.open(f"s3://{BUCKET}/a/out"), f"s3://{BUCKET}/a/out/inside", library.Universal())


def test_source_and_target_in_one_store(user: StoreServer) -> None:
    url = user.put("a/source", ZERO1)
    assert ckpt("convert", url, f"s3://{BUCKET}/a/out").code == 0
    assert ckpt("diff", f"s3://{BUCKET}/a/out", ZERO1).code == 0
