"""Checkpoints in buckets: every sample from real servers, with few requests; and what must be refused."""

import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from safetensors.numpy import save_file

import ckpt as library
from ckpt_formats.core import prefetch
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError
from ckpt_formats.core.rules import rules_of
from ckpt_formats.core.store_path import StorePath, relative_path
from ckpt_formats.stores import clients, object_store, read_ahead
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.location import source_path
from damage import SAMPLES, ckpt
from killing import points
from object_stores import BUCKET, KEY, SECRET, StoreServer, faulty, moto, observed, reached, seaweedfs

NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir() and path.name != "damaged")
MANY_FILES = {name: sum(1 for one in (SAMPLES / name).rglob("*") if one.is_file()) for name in NAMES}


LOGS = ("recorded-2", "recorded-3")
"""Those whose states are in a log alone."""
SOME = ("dcp-2.2-fsdp1-w2", "dcp-2.13-fsdp2-w2", "deepspeed-0.19-zero1-bf16-dp2", "recorded-1", "universal-1-plain")
SOME += ("ds_to_universal-0.19-zero1-bf16-dp2", "transformers-5.23-trainer")


@pytest.fixture(scope="module")
def every_sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """SeaweedFS with all samples: a request takes it a tenth of what it takes moto."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as running:
        for name in NAMES:
            running.put(f"samples/{name}", SAMPLES / name)
        yield running


@pytest.fixture
def user_of_every_sample(every_sample: StoreServer) -> Iterator[StoreServer]:
    with reached(every_sample):
        yield every_sample


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    """moto with some samples."""
    with moto() as running:
        for name in SOME:
            running.put(f"samples/{name}", SAMPLES / name)
        yield running


@pytest.fixture
def user(server: StoreServer) -> Iterator[StoreServer]:
    with reached(server):
        yield server


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that are made: `get`, `list`, `head`."""
    names: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> object:
            if name in ("get", "list", "list_with_delimiter", "head"):
                names.append(name)
            return getattr(obstore, name)

    monkeypatch.setattr(object_store, "obstore", Counted())
    return names


def contents(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick(4)
def test_store_gives_a_sample_as_the_disk_does(
    name: str, user_of_every_sample: StoreServer, tmp_path: Path, requests: list[str]
) -> None:
    """To verify it, to say what a conversion reads, and to convert it each take a listing and a request for a file."""
    url, to = f"s3://{BUCKET}/samples/{name}", ("--to", "safetensors" if name.startswith("universal") else "universal")

    def check_requests() -> None:
        gets = requests.count("get")
        assert gets <= MANY_FILES[name] + 2
        assert len(requests) - gets <= 8  # what lies below, and the folders above where siblings are looked for
        requests.clear()

    assert ckpt("verify", url).code == ckpt("verify", SAMPLES / name).code
    check_requests()
    done = ckpt("convert", url, tmp_path / "store", *to, "--dry-run")
    # What a replay of a log reads is not known before.
    number, is_replayed = r"[1-9][\d.]* (B|KiB|MiB)", name in LOGS
    about = f"about {number} in [1-9]\\d* requests?"
    assert re.search(f"would {'' if is_replayed else f'read {about} and '}write about {number}", done.out)
    check_requests()
    done = ckpt("convert", url, tmp_path / "store", *to)
    assert done.code == 0, done.err
    assert bool(re.search(f"note: reads {about} from the store", done.err)) != is_replayed
    check_requests()
    assert ckpt("convert", SAMPLES / name, tmp_path / "local", *to).code == 0
    assert contents(tmp_path / "store") == contents(tmp_path / "local")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick(3)
def test_store_gives_the_same_bytes_by_requests_ahead(
    name: str, user_of_every_sample: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for large files: blocks of small ones are not used, and requests are small, so that there are many of them.

    The plan names what is read: of what is requested ahead, nothing stays unread, and only padding was not named.
    """
    requested, planned = list[int](), list[int]()
    get, read_into = object_store.ObjectStore.get, prefetch.Prefetch.read_into

    def counted(store: object_store.ObjectStore, key: str, offset: int, nbytes: int) -> memoryview:
        if threading.current_thread().name.startswith("ckpt-prefetch"):
            requested.append(nbytes)
        return get(store, key, offset, nbytes)

    def noted(ahead: prefetch.Prefetch, *rest: Any) -> int | None:
        nbytes = read_into(ahead, *rest)
        planned.append(nbytes or 0)
        return nbytes

    monkeypatch.setattr(object_store.ObjectStore, "get", counted)
    monkeypatch.setattr(prefetch.Prefetch, "read_into", noted)
    monkeypatch.setattr(read_ahead.ReadAhead, "has", lambda *_: False)
    for limit, value in (("_GAP", 64), ("_MAX_REQUEST", 5000), ("_MIN_REQUEST", 1000)):
        monkeypatch.setattr(prefetch, limit, value)
    url = f"s3://{BUCKET}/samples/{name}"
    command = ("reshard", "--tp", "4") if name.startswith("megatron") else ("convert", "--to", "torch")
    for source, target in ((url, "store"), (SAMPLES / name, "local")):
        done = ckpt(command[0], source, tmp_path / target, *command[1:])
        assert done.code == 0, done.err
    assert contents(tmp_path / "store") == contents(tmp_path / "local")
    if name in LOGS:  # nothing of a log is requested ahead
        assert not requested
    else:
        assert sum(planned) > 0.9 * sum(requested) > 0
    assert ckpt("verify", url).code == ckpt("verify", SAMPLES / name).code
    assert ckpt("diff", url, SAMPLES / name).code == 0


def test_the_library_opens_a_url(user: StoreServer) -> None:
    url, local = f"s3://{BUCKET}/samples/dcp-2.2-fsdp1-w2", SAMPLES / "dcp-2.2-fsdp1-w2"
    there, here = library.open(url), library.open(local)
    assert list(there) == list(here)
    for name in here:
        assert np.array_equal(there[name][...], here[name][...])


def test_a_chain_in_a_bucket_is_listed_and_restored(user: StoreServer, tmp_path: Path) -> None:
    url, local = f"s3://{BUCKET}/samples/recorded-1/run.chain", SAMPLES / "recorded-1" / "run.chain"
    assert ckpt("log", "--json", url).out.replace(url, "") == ckpt("log", "--json", local).out.replace(str(local), "")
    for source, target in ((url, "store"), (local, "local")):
        assert ckpt("restore", source, tmp_path / target, "--step", 5).code == 0
    assert ckpt("diff", tmp_path / "store", tmp_path / "local").code == 0
    assert ckpt("diff", f"{url}@5", tmp_path / "local").code == 0


def test_config_in_a_store_is_read_as_one_on_the_disk(user: StoreServer, tmp_path: Path) -> None:
    folder, url = SAMPLES / "transformers-5.23-trainer", f"s3://{BUCKET}/samples/transformers-5.23-trainer"
    model = folder / "model.safetensors"
    for name, config in (("disk", folder), ("store", url)):
        assert ckpt("convert", model, tmp_path / name, "--to", "hf", "--config", config).code == 0
    assert contents(tmp_path / "store") == contents(tmp_path / "disk")
    with pytest.raises(library.InvalidArgumentError, match="config must be a local path or None"):
        library.HuggingFace(config=url)
    assert library.use_names(library.open(model), "hf", config=f"{url}/config.json").keys()
    (tmp_path / "rules.toml").write_text("[[rule]]\nmatch = '.*'\nhow = 'replicated'\n")
    rules = source_path(user.put("rules.toml", tmp_path / "rules.toml"))
    assert rules_of(rules)[0].origin == f"s3://{BUCKET}/rules.toml, rule 1"
    missing = ckpt("convert", model, tmp_path / "none", "--to", "hf", "--config", f"{url}/none.json")
    assert (missing.code, f"{url}/none.json" in missing.err) == (10, True)


def test_a_dry_run_reads_no_tensors(server: StoreServer, tmp_path: Path, requests: list[str]) -> None:
    """Nor does it take requests for each tensor: what it says is computed from the headers."""
    weights = {f"layer.{number}": np.full((1 << 19,), number, np.float32) for number in range(8)}
    save_file(weights, tmp_path / "model.safetensors")
    url = server.put("dry.safetensors", tmp_path / "model.safetensors")
    with reached(server):
        done = ckpt("convert", url, tmp_path / "out", "--dry-run", "--json")
        assert json.loads(done.out)["store_reads"] == {"nbytes": 16 << 20, "requests": 2}
        assert requests.count("get") <= 2
        requests.clear()
        assert ckpt("convert", url, tmp_path / "out").code == 0
        assert requests.count("get") <= 4


def test_a_dry_run_counts_what_checksums_need(user: StoreServer, tmp_path: Path) -> None:
    """One parameter is a few bytes of a partition, but the checksum is of all of it."""
    url, name = f"s3://{BUCKET}/samples/deepspeed-0.19-zero1-bf16-dp2", "blocks.0.norm1.bias"
    parameter = library.open(url)[name]
    seals = {raw.seal for tensor in parameter.states.values() for raw in tensor.sources() if raw.seal is not None}
    done = ckpt("convert", url, tmp_path / "out", "--dry-run", "--json", "--only", name)
    assert json.loads(done.out)["store_reads"]["nbytes"] >= sum(seal.nbytes for seal in seals) > 3 * parameter.nbytes


def test_replaced_object_is_read_anew_when_opened_again(user: StoreServer, tmp_path: Path) -> None:
    """In one process: nothing of the store is kept from one opening to the next."""
    for number in (1.0, 2.0):
        save_file({"w": np.full((300,), number, np.float32)}, tmp_path / "model.safetensors")
        library.save(library.open(tmp_path / "model.safetensors"), tmp_path / f"{number}.ucp", library.Universal())
        url = user.put("replaced.ucp", tmp_path / f"{number}.ucp")
        assert library.open(url)["w"][0] == number


def test_a_truncated_object_is_reported_as_a_truncated_file(user: StoreServer, tmp_path: Path) -> None:
    url = user.put("truncated", SAMPLES / "damaged" / "truncated-shard")
    there, here = (ckpt("convert", one, tmp_path / "out") for one in (url, SAMPLES / "damaged" / "truncated-shard"))
    assert (there.code, there.err.replace(url, "")) == (
        here.code,
        here.err.replace(str(SAMPLES / "damaged" / "truncated-shard"), ""),
    )


def test_store_opens_a_single_object_as_a_file(user: StoreServer, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/samples/transformers-5.23-trainer/model.safetensors"
    done = ckpt("diff", url, SAMPLES / "transformers-5.23-trainer" / "model.safetensors")
    assert done.code == 0, done.err
    assert ckpt("convert", url, tmp_path / "one.ucp").code == 0


def test_an_object_that_is_replaced_while_it_is_read_is_refused(user: StoreServer, tmp_path: Path) -> None:
    user.put("changing", SAMPLES / "dcp-2.2-fsdp1-w2")
    opened = library.open(f"s3://{BUCKET}/changing")
    data = sorted((SAMPLES / "dcp-2.2-fsdp1-w2").glob("*.distcp"))
    for file in data:
        obstore.put(user.client, f"changing/{file.name}", bytes(len(file.read_bytes())))
    with pytest.raises((CorruptError, IncompleteError), match="changed or replaced while it was read"):
        library.save(opened, tmp_path / "out", library.Universal())
    obstore.delete(user.client, [f"changing/{file.name}" for file in data])
    with pytest.raises(IncompleteError, match="removed while it was read"):
        library.save(opened, tmp_path / "out", library.Universal())
    assert not (tmp_path / "out").exists()


def test_a_store_that_fails_now_and_then_gives_the_same_bytes(user: StoreServer, tmp_path: Path) -> None:
    """One of four requests for ranges is answered with 500, 503, a reset, or half of the bytes."""
    name = "ds_to_universal-0.19-zero1-bf16-dp2"
    with faulty(user, 0.25) as (proxy, faults), reached(proxy):
        done = ckpt("convert", f"s3://{BUCKET}/samples/{name}", tmp_path / "store")
    assert done.code == 0, done.err
    assert min(faults.values()) > 0, faults
    assert ckpt("convert", SAMPLES / name, tmp_path / "local").code == 0
    assert contents(tmp_path / "store") == contents(tmp_path / "local")


def test_no_credential_is_printed_or_stored(user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_STORE_RETRY", "0")
    url = f"s3://{BUCKET}/samples/universal-1-plain"
    done = ckpt("convert", url, tmp_path / "out", "--json")
    texts = [done.out, done.err, *(one.decode("latin-1") for one in contents(tmp_path / "out").values())]
    with reached(StoreServer("http://127.0.0.1:1")):  # nobody listens there
        refused = ckpt("inspect", url)
    assert refused.code == 10
    assert "cannot be read" in refused.err
    for text in (*texts, refused.err, repr(pickle.dumps(source_path(url)))):
        assert KEY not in text
        assert SECRET not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", f"s3://{BUCKET}/nothing"), "there is nothing at this path"),
        (("verify", f"s3://{BUCKET}/samples"), "checkpoints"),
        (("inspect", "s3://no-such-bucket/x"), "NoSuchBucket"),
        (("inspect", "s3://"), "s3://BUCKET/KEY"),
        (("inspect", "ftp://host/x"), "s3://BUCKET/KEY"),
        (("convert", SAMPLES / "universal-1-plain", "ftp://host/x"), "s3://BUCKET/KEY"),
        (("convert", SAMPLES / "universal-1-plain", "s3://no-such-bucket/x"), "NoSuchBucket"),
        (("shadow", "--once", f"s3://{BUCKET}/samples/recorded-1/run.chain"), "is followed only there"),
        (
            ("diff", f"s3://{BUCKET}/samples/universal-1-plain", SAMPLES / "universal-1-coded", "-o", "delta"),
            "a delta and its parent are in one file system",
        ),
    ],
    ids=lambda value: " ".join(map(str, value)).replace(str(SAMPLES), "")[:40] if isinstance(value, tuple) else "",
)
def test_store_refuses_what_it_cannot_do(
    arguments: tuple[object, ...], words: str, user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ckpt(*arguments)
    assert done.code in (10, 11, 20, 21, 22), done.err
    assert words in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_store_fails_when_the_listing_is_refused(user: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_MAX_OBJECTS", 3)
    with pytest.raises(library.errors.UnsafeError, match="more than 3 objects"):
        source_path(f"s3://{BUCKET}/samples")


def test_a_path_of_a_store_never_reaches_the_file_system(user: StoreServer) -> None:
    path = source_path(f"s3://{BUCKET}/samples/universal-1-plain")
    assert isinstance(path, StorePath)
    for attempt in (os.stat, os.listdir, open, os.fspath):
        with pytest.raises(TypeError, match="in an object store"):
            attempt(path)
    for wrong in (path.mkdir, path.unlink, path.touch, lambda: path.open("wb")):
        with pytest.raises(TypeError, match="in an object store"):
            wrong()


def test_store_path_derives_paths(user: StoreServer) -> None:
    path = source_path(f"s3://{BUCKET}/samples/universal-1-plain/")
    assert isinstance(path, StorePath)
    assert str(path / "a" / "b.txt") == f"s3://{BUCKET}/samples/universal-1-plain/a/b.txt"
    assert (path / "b.txt").suffix == ".txt"
    assert (path / "a/b").relative_to(path) == Path("a/b")
    assert path.parent.parent == path.parents[1]
    assert list(path.parents) == [path.parent, path.parent.parent]
    for other in (path / ".." / "other", path / "a/./../../other", StorePath(path.store, "samples/x/../other")):
        assert str(other) == f"s3://{BUCKET}/samples/other"
        assert other == path.parent / "other" == other.resolve()
    assert str(path / "../../../..") == f"s3://{BUCKET}"
    assert path / "a//b" == path / "a" / "b" == path / "a//.//b"
    assert relative_path(path, root := StorePath(path.store)) == path.key
    assert root / path.key / relative_path(root, path) == root
    assert pickle.loads(pickle.dumps(path)) == path
    assert path.is_dir()
    assert (path / "manifest.json").is_file()
    assert not (path / "manifest.jso").exists()
    assert [one.name for one in path.glob("*.json")] == ["manifest.json"]
    assert {one.name for one in path.iterdir()} == {one.name for one in (SAMPLES / "universal-1-plain").iterdir()}
    beside = path.parent / "recorded-1"  # it is not below the path that was opened
    assert beside.is_dir()
    assert not (path.parent / "no-such").exists()


def test_stores_are_not_imported_without_a_url() -> None:
    code = (
        "import sys, ckpt, ckpt_cli.main; ckpt.open(sys.argv[1]);"
        "print([m for m in sys.modules if m.split('.')[0] in ('obstore', 'boto3') or 'object_store' in m])"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(SAMPLES / "universal-1-plain")], capture_output=True)
    assert ran.stdout.strip() == b"[]", ran.stderr


def test_store_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "ckpt_formats.stores.object_store")
    monkeypatch.delattr("ckpt_formats.stores.object_store")
    with pytest.raises(library.UnsupportedError, match="need the package obstore") as refused:
        source_path("s3://bucket/x")
    assert "ckpt-suite[cloud]" in str(refused.value.hint)


def test_anonymous_requests_are_not_signed(user: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}/samples/universal-1-plain"
    user.publish("samples/universal-1-plain")
    user.publish("samples/recorded-1")
    with observed(user) as (proxy, signed), reached(proxy):
        assert ckpt("inspect", url).code == 0
        assert signed
        assert all(signed)
        signed.clear()
        assert ckpt("diff", url, SAMPLES / "universal-1-plain", "--anonymous").code == 0
        assert library.open(url, anonymous=True).step == library.open(SAMPLES / "universal-1-plain").step
        assert ckpt("log", f"s3://{BUCKET}/samples/recorded-1/run.chain", "--anonymous").code == 0
        assert signed
        assert not any(signed)


@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "diff"])
def test_a_command_makes_one_client_of_a_bucket(
    command: str, user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, from_url = [], obstore.store.from_url
    monkeypatch.setattr(clients, "_CLIENTS", {})
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **more: urls.append(url) or from_url(url, **more))
    url = f"s3://{BUCKET}/samples/{NAMES[0]}"
    more = {"convert": [tmp_path / "out"], "diff": [SAMPLES / NAMES[0]]}.get(command, [])
    assert ckpt(command, url, *more).code == 0
    assert urls == [f"s3://{BUCKET}"]


def test_a_fork_of_a_process_that_used_a_store_is_refused_one_at_once(user: StoreServer, tmp_path: Path) -> None:
    """It would wait for ever for threads that it does not have: workers of a DataLoader are such forks."""
    save_file({"w": np.zeros(400_000, np.float32)}, tmp_path / "large.safetensors")
    url = user.put("large.safetensors", tmp_path / "large.safetensors")
    opened = library.open(url)

    def use() -> None:
        for request in (lambda: library.open(url), lambda: opened["w"].weight[...], lambda: Bucket(url).read("x")):
            with pytest.raises(UnsupportedError, match="forked from one that has used a store"):
                request()

    points(use, tmp_path)
    assert opened["w"].weight[...].size == 400_000


def test_an_account_of_azure_is_not_its_container() -> None:
    for anonymous in (False, True):
        config = clients.client_of("az://account/container", anonymous=anonymous).config
        assert (config["account_name"], config["container_name"]) == ("account", "container")
        assert config.get("skip_signature") == ("true" if anonymous else None)


@pytest.mark.parametrize("key", ["odd//m.pt", "odd/./m.pt", "odd/../m.pt"])
def test_a_listing_with_a_key_that_is_no_path_is_refused_at_once(
    key: str, user: StoreServer, requests: list[str]
) -> None:
    with user.holding(key, b"content"):
        done = ckpt("inspect", f"s3://{BUCKET}/odd")
    assert (done.code, "the key of an object is no path" in done.err, key in done.err) == (10, True, True)
    assert requests.count("list") == 1


def test_store_path_does_not_escape_its_prefix(user: StoreServer) -> None:
    with pytest.raises(NotFoundError, match=r"no object has a part `\.\.`"):
        library.open(f"s3://{BUCKET}/samples/../../etc")
