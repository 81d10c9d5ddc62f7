"""A chain that is served over HTTP is read like one in a folder; whoever else connects gets nothing."""

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from caching_proxy import caching_proxy
from ckpt.serving import server as serving
from ckpt.serving import stored_files
from ckpt.serving.server import ChainServer
from ckpt_formats.core.errors import CkptError, CorruptError, InvalidArgumentError, NotFoundError, UnsafeError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.place import Version
from ckpt_formats.stores.address import NetworkAddress, tls_of
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.http_place import HttpPlace
from ckpt_formats.stores.location import read_place, source_path
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex
from damage import ckpt
from growing_log import log_with_fingerprints
from http_peers import HTTP_HOSTILE, SEGMENT
from object_stores import BUCKET
from static_server import static_server

HERE = NetworkAddress("127.0.0.1", 0)
TOKEN = b"a token that is long enough"


@contextmanager
def served(chain: Path | str, token: bytes | None = None) -> Iterator[ChainServer]:
    server = ChainServer(chain, HERE, token)
    yield server
    server.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A recorded run with a base, and what does not belong to it beside it."""
    log_with_fingerprints(12, 3).write(tmp_path / "run.chain")
    run = tmp_path / "run.chain"
    assert ckpt("shadow", run, "--once", "--base-every", 9).code == 0
    (run / "secret").write_text("x")
    (run / SEGMENT / "link").symlink_to("/etc/passwd")
    (run / "step-0000000009" / "inner").symlink_to("/etc")
    return run


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The skeleton of a published chain: the server reads nothing but names."""
    chain = tmp_path / "policy.chain"
    for name in ("objects", "steps", "folds"):
        (chain / "published" / name).mkdir(parents=True)
    (chain / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex((), is_published=True)))
    (chain / "published" / "head.json").write_bytes(b"{}")
    (chain / "published" / "objects" / "0123").write_bytes(bytes(1000))
    (chain / "published" / "objects" / ".0124-x.draft").write_bytes(b"not yet")
    return chain


def get(
    server: ChainServer, path: str, headers: Mapping[str, str] = {}, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=60)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_ranges_and_conditions_are_those_of_http(
    place: str, published: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    (published / "published" / "objects" / "0123").write_bytes(bytes(range(100)))
    path = "/policy.chain/published/objects/0123"
    if place == "bucket":
        request.getfixturevalue("user").upload(published)
        monkeypatch.setattr(stored_files, "_BLOCK", 30)  # several requests for a body
    with served(published if place == "folder" else f"s3://{BUCKET}/policy.chain") as server:
        status, headers, body = get(server, path)
        assert (status, body, headers["content-length"]) == (200, bytes(range(100)), "100")
        assert headers["cache-control"] == "public, max-age=31536000, immutable"
        tag = headers["etag"]
        for text, begin, end in (("10-19", 10, 20), ("90-200", 90, 100), ("95-", 95, 100), ("-3", 97, 100)):
            status, headers, body = get(server, path, {"Range": f"bytes={text}", "If-Range": tag})
            assert (status, body) == (206, bytes(range(begin, end)))
            assert headers["content-range"] == f"bytes {begin}-{end - 1}/100"
        assert get(server, path, {"Range": "bytes=100-"})[:2][0] == 416
        assert get(server, path, {"Range": "bytes=100-"})[1]["content-range"] == "bytes */100"
        for whole in ("bytes=0-1,3-4", "lines=1-2", "bytes=x"):
            assert len(get(server, path, {"Range": whole})[2]) == 100
        assert get(server, path, {"Range": "bytes=0-1", "If-Range": '"other"'})[0] == 200
        assert get(server, path, method="HEAD")[::2] == (200, b"")
        assert get(server, path, {"If-None-Match": f'"x", W/{tag}'})[::2] == (304, b"")
        assert get(server, path, {"If-Match": '"other"'})[0] == 412
        assert get(server, path, {"If-Match": tag})[0] == 200
        assert get(server, path, method="PUT")[0] == 501
        assert get(server, "/policy.chain/published/head.json")[1]["cache-control"] == "no-cache"
        files = json.loads(get(server, "/policy.chain/published/?list")[2])["files"]
        assert files == {"head.json": [2, files["head.json"][1]], "objects/0123": [100, tag]}
        for other in ("other", "published/objects/0124", "published/objects/.0124-x.draft", "published/../chain.json"):
            assert get(server, f"/policy.chain/{other}")[0] == 404


def test_server_sends_only_what_the_chain_names(run: Path, published: Path) -> None:
    with served(run) as server:
        listed = json.loads(get(server, "/run.chain/?list")[2])
        names = set(listed["files"])
        assert "chain.json" in names
        assert {name.partition("/")[0] for name in names} == {"chain.json", SEGMENT, "step-0000000009"}
        assert not any("link" in name or "inner" in name for name in names)
        assert all(get(server, f"/run.chain/{name}")[0] == 200 for name in names)
        log = f"/run.chain/{SEGMENT}"
        for path in (
            *("/", "/run.chain", "/run.chain/", "/other/chain.json", "/run.chain/secret", "/run.chain/chain.lock"),
            *(
                log,
                f"{log}/",
                f"{log}/link",
                f"/run.chain/./{SEGMENT}/layout.json",
                f"/run.chain//{SEGMENT}/layout.json",
            ),
            *("/run.chain/step-0000000009/inner/passwd", "/run.chain/step-0000000009/inner/?list", "chain.json", "*"),
            *(f"{log}/../secret", f"{log}/..%2Fsecret", "/run.chain/%00", "/run.chain/%ff", "/run.chain/..?list"),
            *("/run.chain/?list=" + "x&" * 20, "/run.chain/secret?list", "http://x/run.chain/chain.json"),
        ):
            status, _, body = get(server, path)
            assert status in (400, 404), path
            assert b"root:" not in body
    with served(published) as server:
        assert set(json.loads(get(server, "/policy.chain/?list")[2])["files"]) == {
            *("chain.json", "published/head.json", "published/objects/0123")
        }
        assert get(server, "/policy.chain/published/objects/.0124-x.draft")[0] == 404


def test_version_is_served_for_ever_or_not_at_all(run: Path) -> None:
    with served(run) as server:
        path = "/run.chain/chain.json"
        tag = get(server, path)[1]["etag"]
        assert get(server, f"{path}?v={tag}")[1]["cache-control"] == "public, max-age=31536000, immutable"
        os.utime(run / "chain.json", (1, 1))
        status, headers, _ = get(server, f"{path}?v={tag}")
        assert (status, headers["cache-control"]) == (412, "no-store")
        log = f"/run.chain/{SEGMENT}/rank-00000.ckg"
        ended = get(server, log)[1]["cache-control"]
        assert ended == ("no-store" if chain_file.load(run / "chain.json").segments[0].step is None else "no-cache")


def test_answers_wait_for_a_change(published: Path) -> None:
    with served(published) as server:
        place, folder = read_place(server.url), FolderPlace(published)
        head = place.read("published/head.json")
        there = folder.read("published/head.json")
        assert head is not None
        assert there is not None
        began = time.monotonic()
        assert place.read_if_changed("published/head.json", head[1], seconds=0.2) is None
        assert time.monotonic() - began >= 0.2
        thread = threading.Timer(0.1, lambda: folder.replace("published/head.json", b"{ }", there[1]))
        thread.start()
        changed = place.read_if_changed("published/head.json", head[1], seconds=30)
        thread.join()
        assert changed is not None
        assert changed[0] == b"{ }"
        status, headers, _ = get(server, "/policy.chain/published/?list")
        thread = threading.Timer(0.1, lambda: folder.create("published/objects/0124", b"more"))
        thread.start()
        waits = {"If-None-Match": headers["etag"], "Prefer": "respond-async, wait=30"}
        status, _, body = get(server, "/policy.chain/published/?list", waits)
        thread.join()
        assert status == 200
        assert "objects/0124" in json.loads(body)["files"]
        assert time.monotonic() - began < 20  # less than the server waits at most


def test_commands_read_a_served_chain(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(run) as server:
        assert ckpt("inspect", server.url).code == 0
        done = ckpt("restore", f"{server.url}@11", tmp_path / "out")
        assert done.code == 0, done
        assert ckpt("diff", tmp_path / "out", f"{run}@11").code == 0
        copied = ckpt("copy", server.url, tmp_path / "copy.chain")
        assert copied.code == 0, copied
        assert ckpt("diff", tmp_path / "copy.chain", run).code == 0
        step = run / "step-0000000009"
        path = source_path(f"{server.url}/step-0000000009/manifest.json")
        content = path.read_bytes()
        assert content == (step / "manifest.json").read_bytes()
        path = source_path(f"{server.url}/step-0000000009/manifest.json")
        (step / "manifest.json").write_bytes(content[::-1])
        with pytest.raises(CorruptError, match="was changed"):
            path.read_bytes()
    monkeypatch.setenv("CKPT_STORE_RETRY", "0")
    assert ckpt("inspect", server.url).code == 10
    assert ckpt("append", server.url, tmp_path / "out").code == 22


def test_files_of_a_web_server_are_read_without_a_list(run: Path, tmp_path: Path) -> None:
    with static_server(tmp_path) as url:
        assert ckpt("restore", f"{url}/run.chain/step-0000000009", tmp_path / "out").code == 0
        assert ckpt("diff", tmp_path / "out", f"{run}@9").code == 0
        assert ckpt("inspect", f"{url}/nothing").code == 10
        assert ckpt("inspect", url).code == 10


def test_other_machines_need_a_token_and_tls(run: Path, certificate: tuple[Path, Path]) -> None:
    tls = tls_of(*certificate)
    for token, context in ((None, None), (TOKEN, None), (None, tls)):
        with pytest.raises(InvalidArgumentError, match="needs a token and TLS"):
            ChainServer(run, NetworkAddress("0.0.0.0", 0), token, context)
    with pytest.raises(InvalidArgumentError, match="must have 16"):
        ChainServer(run, HERE, b"short")
    with pytest.raises(NotFoundError):
        ChainServer(run.parent, HERE)
    server = ChainServer(run, HERE, TOKEN, tls)
    trusted = certificate[0]
    assert HttpPlace.of(server.url, Credentials(TOKEN, trusted)).read("chain.json") is not None
    with pytest.raises(OSError, match="refuses: status 401"):
        HttpPlace.of(server.url, Credentials(None, trusted)).read("chain.json")
    with pytest.raises(OSError, match="refuses: status 401"):
        HttpPlace.of(server.url, Credentials(TOKEN + b"!", trusted)).read("chain.json")
    with pytest.raises(UnsafeError, match="not trusted"):
        HttpPlace.of(server.url, Credentials(TOKEN)).read("chain.json")
    server.close()


def test_token_is_taken_from_the_environment(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(run, TOKEN) as server:
        refused = ckpt("inspect", server.url)
        assert refused.code == 10
        assert "CKPT_TOKEN" in refused.err
        monkeypatch.setenv("CKPT_TOKEN", TOKEN.decode())
        assert ckpt("inspect", server.url).code == 0


@pytest.mark.parametrize("name", HTTP_HOSTILE)
def test_hostile_peers_get_nothing_and_change_nothing(name: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for field in ("LOGIN_SECONDS", "IDLE_SECONDS", "SEND_SECONDS", "MAX_WAIT"):
        monkeypatch.setattr(serving, field, 0.3)
    problems: list[object] = []
    monkeypatch.setattr(threading, "excepthook", problems.append)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with served(run) as server:
        with socket.create_connection((server.address.host, server.address.port), 5) as peer:
            answer = b""
            with suppress(ConnectionError):
                peer.sendall(HTTP_HOSTILE[name])
                while part := peer.recv(1 << 16):
                    answer += part
        if name not in ("a range of text", "a huge range", "waits for ever"):
            assert b" 200 " not in answer
        assert get(server, "/run.chain/chain.json")[0] == 200
    assert problems == []
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_slow_peers_are_ended_and_others_served(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that take nothing, or send a byte now and then, fill the server; later ones are let in again."""
    (published / "published" / "objects" / "large").write_bytes(bytes(32 << 20))
    monkeypatch.setattr(serving, "LOGIN_SECONDS", 0.5)
    monkeypatch.setattr(serving, "SEND_SECONDS", 0.5)
    monkeypatch.setattr(serving, "_SLOWEST", 1 << 40)
    monkeypatch.setattr(serving, "MAX_PEERS", 8)
    with served(published) as server:
        where = (server.address.host, server.address.port)
        peers = [socket.create_connection(where, 5) for _ in range(8)]
        for peer in peers[:4]:
            peer.sendall(b"GET /policy.chain/published/objects/large HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.2)
        with socket.create_connection(where, 5) as another, suppress(ConnectionError):
            assert another.recv(1) == b""
        place = HttpPlace.of(server.url)
        assert place.read("published/head.json") is not None, "after some attempts"
        for peer in peers:
            peer.close()


def test_many_readers_are_served_at_once(published: Path) -> None:
    content = os.urandom(1 << 20)
    (published / "published" / "objects" / "0123").write_bytes(content)
    problems: list[BaseException] = []
    with served(published) as server:
        place = read_place(server.url)

        def read() -> None:
            try:
                for at in range(0, 1 << 20, 1 << 18):
                    assert place.read_range("published/objects/0123", at, 1 << 18) == content[at : at + (1 << 18)]
                assert place.read_if_changed("published/head.json", Version('"x"')) is not None
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=read) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
    with pytest.raises(CkptError):
        read_place("https://")


def test_cache_in_front_carries_many_readers(run: Path) -> None:
    """50 readers of files that may be replaced, by their versions, take the bytes of one from the server."""

    def read(url: str) -> None:
        step = source_path(f"{url}/step-0000000009")
        for one in (run / "step-0000000009").iterdir():
            if one.is_file():
                assert (step / one.name).read_bytes() == one.read_bytes()

    with served(run) as server, caching_proxy(f"http://{server.address}") as cache:
        read(f"{cache.url}/run.chain")
        first = cache.fetched
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, [f"{cache.url}/run.chain"] * 49))
        assert first > 0
        assert cache.fetched <= 1.1 * first
