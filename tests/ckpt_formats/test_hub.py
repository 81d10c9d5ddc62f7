"""Checkpoints in repositories of the Hugging Face Hub: by its own client, from a server that speaks its protocol."""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

import ckpt as library
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.stores.location import source_path
from damage import SAMPLES, ckpt
from hub_server import SIGNATURE, TOKEN, Hub, Repository, hub
from killing import points

NAMES = ("transformers-5.23-trainer", "deepspeed-0.19-zero1-bf16-dp2", "dcp-2.2-fsdp1-w2")


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub() as running:
        for name in NAMES:
            running.repositories[f"org/{name}"] = Repository()
            running.repositories[f"org/{name}"].commit(SAMPLES / name)
        yield running


@pytest.fixture
def user(server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A user without a token."""
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    server.requests.clear()
    server.failing.clear()
    return server


@pytest.mark.parametrize("name", NAMES)
def test_a_repository_is_read_as_from_the_disk(name: str, user: Hub) -> None:
    """With a request for the commit, one for each page of the listing, and one or two for each file."""
    done = ckpt("diff", f"hf://org/{name}", SAMPLES / name)
    assert done.code == 0, done.err
    files = sum(1 for one in (SAMPLES / name).rglob("*") if one.is_file())
    assert user.gets_of_ranges <= files + 2
    assert sum(path.startswith("/api/models/") for _, path, _ in user.requests) <= 4


def test_the_command_reads_from_the_address_in_the_environment(server: Hub, tmp_path: Path) -> None:
    """As users run it: HF_ENDPOINT and HF_TOKEN, in a process of its own."""
    server.repositories["org/own"] = Repository(access="private")
    server.repositories["org/own"].commit(SAMPLES / NAMES[0])
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN}
    command = [sys.executable, "-m", "ckpt_cli", "convert", "hf://org/own", str(tmp_path / "out.ucp"), "--json"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert library.open(tmp_path / "out.ucp").step == library.open(SAMPLES / NAMES[0]).step
    for text in (ran.stdout, ran.stderr, *(one.read_bytes().decode("latin-1") for one in tmp_path.rglob("*.ucp"))):
        assert TOKEN not in text
        assert SIGNATURE not in text


def test_a_revision_is_one_commit_whatever_is_uploaded_meanwhile(user: Hub) -> None:
    repository = user.repositories["org/moving"] = Repository()
    first = repository.commit(SAMPLES / "transformers-5.23-trainer")
    opened = library.open("hf://org/moving")
    assert f"@{first}" in str(opened.path)
    repository.commit(SAMPLES / "dcp-2.2-fsdp1-w2", "main")
    local = library.open(SAMPLES / "transformers-5.23-trainer")
    assert all(np.array_equal(opened[name][...], local[name][...]) for name in local)
    assert set(library.open("hf://org/moving")) != set(local)
    assert set(library.open(f"hf://org/moving@{first}")) == set(local)
    repository.commit(SAMPLES / "transformers-5.23-trainer", "a/branch")
    assert set(library.open("hf://org/moving@a%2Fbranch")) == set(local)


def test_a_fork_reads_what_its_parent_process_opened(user: Hub, tmp_path: Path) -> None:
    """As workers of a DataLoader: the threads that read ahead are only in the process that forked them."""
    values = np.arange(400_000, dtype=np.float32)
    save_file({"w": values}, tmp_path / "model.safetensors")
    user.repositories["org/large"] = Repository()
    user.repositories["org/large"].commit(tmp_path)
    weight = library.open("hf://org/large")["w"].weight
    assert weight[:10].tolist() == list(range(10))

    def read() -> None:
        assert np.array_equal(weight[...], values)

    points(read, tmp_path)


def test_hub_opens_a_folder_and_a_file_of_a_repository(user: Hub, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a2").mkdir(parents=True)
    for one in (SAMPLES / "transformers-5.23-trainer").iterdir():
        (tmp_path / "runs" / "a2" / one.name).write_bytes(one.read_bytes())
    user.repositories["org/runs"] = Repository()
    user.repositories["org/runs"].commit(tmp_path)
    for place, local in (("runs/a2", ""), ("runs/a2/model.safetensors", "model.safetensors")):
        done = ckpt("diff", f"hf://org/runs/{place}", SAMPLES / "transformers-5.23-trainer" / local)
        assert done.code == 0, done.err


def test_a_token_goes_to_the_hub_and_to_nobody_else(user: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    user.repositories["org/secret"] = Repository(access="private")
    user.repositories["org/secret"].commit(SAMPLES / "dcp-2.2-fsdp1-w2")
    assert ckpt("verify", "hf://org/secret").code == 0
    large = [had_token for _, path, had_token in user.requests if path.startswith("/cdn/")]
    assert large
    assert not any(large)
    assert all(had_token for _, path, had_token in user.requests if not path.startswith("/cdn/"))
    path = source_path("hf://org/secret")
    assert TOKEN not in repr(pickle.dumps(path))
    assert pickle.loads(pickle.dumps(path)) == path
    user.requests.clear()
    assert ckpt("inspect", "hf://org/secret", "--anonymous").code == 10
    assert not any(had_token for _, _, had_token in user.requests)


@pytest.mark.parametrize(
    ("access", "url", "words"),
    [
        ("private", "hf://org/refused", ("no such repository, or it is private", "HF_TOKEN")),
        ("gated", "hf://org/refused", ("is granted on request only", "Ask for access")),
        ("public", "hf://org/missing", ("no such repository", "hf auth login")),
        ("public", "hf://org/refused@v9", ("the repository has no revision v9", "hf://org/refused@v9")),
        ("public", "hf://org/refused/nothing", ("there is nothing at this path", "/nothing")),
        ("public", "hf://org", ("the organisation is missing", "hf://ORG/MODEL")),
        ("public", "hf://org/a/../b", ("no object has a part", "hf://org/a/../b")),
    ],
)
def test_error_of_the_hub_has_a_hint(access: str, url: str, words: tuple[str, str], user: Hub) -> None:
    user.repositories["org/refused"] = Repository(access=access)
    user.repositories["org/refused"].commit(SAMPLES / NAMES[0])
    done = ckpt("inspect", url)
    assert done.code in (10, 22), done.err
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err
    assert SIGNATURE not in done.err


@pytest.mark.parametrize("statuses", [[429, 503], [500, 502], [403]], ids=str)
def test_requests_that_fail_are_repeated(statuses: list[int], user: Hub) -> None:
    """403: a signed address that is not valid any more is asked for again."""
    name = "dcp-2.2-fsdp1-w2"
    opened = library.open(f"hf://org/{name}")
    user.failing += statuses if statuses != [403] else []
    first = next(iter(opened))
    assert np.array_equal(opened[first][...], library.open(SAMPLES / name)[first][...])
    if statuses == [403]:
        path = next(one for one in source_path(f"hf://org/{name}").iterdir() if one.suffix == ".distcp")
        store = path.store  # type: ignore[attr-defined]
        whole = bytes(store.get(path.key, 0, 100))  # type: ignore[attr-defined]
        user.failing += statuses
        assert bytes(store.get(path.key, 0, 100)) == whole  # type: ignore[attr-defined]
    assert not user.failing


def test_an_address_that_ends_is_asked_for_again_by_all_threads(user: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "dcp-2.2-fsdp1-w2"
    path = next(one for one in source_path(f"hf://org/{name}").iterdir() if one.suffix == ".distcp")
    store, whole = path.store, (SAMPLES / name / path.name).read_bytes()  # type: ignore[attr-defined]
    assert bytes(store.get(path.key, 0, 100)) == whole[:100]  # type: ignore[attr-defined]
    monkeypatch.setattr(user, "together", threading.Barrier(4))
    user.failing += [403] * 4
    with ThreadPoolExecutor(4) as pool:
        read = [pool.submit(store.get, path.key, at, 50) for at in range(4)]  # type: ignore[attr-defined]
        assert [bytes(one.result()) for one in read] == [whole[at : at + 50] for at in range(4)]


def test_another_range_than_was_requested_is_refused(user: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source_path(f"hf://org/{NAMES[0]}") / "model.safetensors"
    monkeypatch.setattr(user, "shift", 8)
    with pytest.raises(StoreError, match="another range"):
        path.store.get(path.key, 0, 64)  # type: ignore[attr-defined]


def test_files_beside_a_folder_cannot_be_read_of_a_hub_that_is_gone(
    user: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPT_STORE_RETRY", "0.1")
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "config.json").write_text("{}")
    user.repositories["org/deep"] = Repository()
    user.repositories["org/deep"].commit(tmp_path)
    path = source_path("hf://org/deep/a folder")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # by which its client would wait before it asks again
    with pytest.raises(StoreError, match="cannot be reached"):
        (path.parent / "beside").exists()


@pytest.mark.parametrize("header", ["X-Repo-Commit", "X-Linked-ETag"])
def test_an_answer_about_another_file_is_refused(header: str, user: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user, "lies", {header: "0" * 40})
    with pytest.raises(CorruptError, match="another file than the one that the commit has"):
        library.open(f"hf://org/{NAMES[0]}/config.json")
    monkeypatch.setattr(user, "lies", {"X-Linked-ETag": '"what-another-cache-says"'})
    library.open(f"hf://org/{NAMES[0]}")


@pytest.mark.parametrize(("key", "flips"), [("config.json", 1), ("config.json", 2), ("model.safetensors", 2)])
def test_bytes_that_lack_the_hash_of_the_listing_are_refused(key: str, flips: int, user: Hub) -> None:
    path = source_path(f"hf://org/{NAMES[0]}") / key
    store, size = path.store, path.stat().st_size  # type: ignore[attr-defined]
    user.flips = flips
    if flips == 1:  # read again
        assert bytes(store.get(key, 0, size)) == (SAMPLES / NAMES[0] / key).read_bytes()
    else:
        with pytest.raises(CorruptError, match="do not have the hash"):
            store.get(key, 0, size)
    assert not user.flips


def test_hub_refuses_to_write_to_a_repository(tmp_path: Path) -> None:
    done = ckpt("convert", SAMPLES / NAMES[0], "hf://org/new")
    assert done.code == 22
    assert "ckpt does not write to the Hugging Face Hub" in done.err
    assert "hf upload org/new" in done.err


def test_hub_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "ckpt_formats.stores.hub", raising=False)
    with pytest.raises(UnsupportedError, match="need the package huggingface_hub") as refused:
        source_path("hf://org/model")
    assert "ckpt-suite[hf]" in str(refused.value.hint)
