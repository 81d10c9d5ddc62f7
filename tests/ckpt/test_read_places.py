"""What is read by name is the same in a folder, in a bucket, and below a URL."""

import gc
import pickle
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError, UnsafeError, UnsupportedError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.place import Place, ReadPlace, Version
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.stores import http_client
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.bucket_place import BucketPlace
from ckpt_formats.stores.http_place import HttpPlace
from ckpt_formats.stores.location import read_place
from ckpt_formats.stores.repetition import RetryPolicy
from object_stores import BUCKET, StoreServer
from static_server import static_server


def check_reads(place: ReadPlace, written: Place) -> None:
    """Raise `AssertionError` for a rule that a place breaks. `written`: the same place."""
    version = written.create("head.json", b"first")
    written.within("objects").create("a name%2F?", bytes(range(256)) * 16)
    assert place.read("never there") is None
    first = place.read("head.json")
    assert first is not None
    assert first[0] == b"first"
    with pytest.raises(UnsafeError, match="more than it can need"):
        place.read("head.json", 4)
    assert place.read("head.json", 5) == first
    assert place.read_if_changed("head.json", first[1]) is None
    version = written.replace("head.json", b"other", version)
    second = place.read_if_changed("head.json", first[1])
    assert second is not None
    assert second[0] == b"other", "of the same size, within the same second"
    assert place.read_if_changed("head.json", second[1], seconds=0.01) is None
    objects = place.within("objects")
    assert bytes(objects.read_range("a name%2F?", 250, 12)) == bytes([*range(250, 256), *range(6)])
    assert objects.read_range("a name%2F?", 0, 4096) == bytes(range(256)) * 16
    for offset in (4090, 5000):
        with pytest.raises(CorruptError, match="are needed"):
            objects.read_range("a name%2F?", offset, 10)
    with pytest.raises(FileNotFoundError):
        place.read_range("never there", 0, 1)
    written.delete(["head.json"])
    with pytest.raises(FileNotFoundError):
        place.read_if_changed("head.json", second[1])
    sent = pickle.loads(pickle.dumps(place))
    assert (sent, sent.read("objects/a name%2F?")) == (place, place.read("objects/a name%2F?"))


def test_folder_is_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    check_reads(read_place(str(tmp_path)), FolderPlace(tmp_path))


def test_bucket_is_read_by_name(user: StoreServer) -> None:
    place = BucketPlace(Bucket(f"s3://{BUCKET}"), "a/chain")
    assert read_place(f"s3://{BUCKET}/a//chain/") == place
    check_reads(place, place)


def test_files_of_a_plain_web_server_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "a chain" / "objects").mkdir(parents=True)
    with static_server(tmp_path) as url:
        check_reads(read_place(f"{url}/a%20chain/"), FolderPlace(tmp_path / "a chain"))


def test_folder_waits_for_another_version(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path)
    version = place.create("head.json", b"first")
    thread = threading.Timer(0.05, lambda: place.replace("head.json", b"later", version))
    thread.start()
    began = time.monotonic()
    changed = place.read_if_changed("head.json", version, seconds=300)
    thread.join()
    assert changed is not None
    assert changed[0] == b"later"
    assert time.monotonic() - began < 100


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///x",
        "http://u:secret@h/x",
        "http://h/../x",
        "http://h/a%2F..%2Fb",
        "https://h/x?y",
        "http://h:x/",
    ],
)
def test_urls_that_are_no_places_are_refused(url: str) -> None:
    with pytest.raises(CkptError) as refused:
        read_place(url)
    assert "secret" not in str(refused.value)


def test_token_is_not_sent_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TOKEN", "a token that is long enough")
    with pytest.raises(UnsafeError, match="without TLS"):
        read_place("http://192.0.2.1/x").read("y")
    monkeypatch.setenv("CKPT_TOKEN", "a token\nof two lines")
    with pytest.raises(CkptError, match="no header can have"):
        read_place("https://192.0.2.1/x").read("y")
    assert isinstance(read_place("https://192.0.2.1/x"), HttpPlace)
    with pytest.raises((NotFoundError, UnsupportedError)):
        read_place("ftp://192.0.2.1/x")


ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "address": (302, {"Location": "http://[x/"}, b""),
    "port": (302, {"Location": "http://127.0.0.1:99999/x"}, b""),
    "host": (302, {"Location": "http://a..b/x"}, b""),
    "letters": (302, {"Location": "/there/an é"}, b""),
    "/there/an%20%C3%A9": (200, {}, b"there"),
    "part": (206, {"Content-Range": "bytes 0-2/9"}, b"abc"),
    "unchanged": (304, {}, b""),
    "condition": (412, {}, b"<html>"),
    "no range": (416, {}, b"<html>"),
    "coded": (200, {"Content-Encoding": "gzip"}, b"abc"),
    "coded page of no object": (404, {"Content-Encoding": "gzip"}, b"abc"),
    "long page of no object": (404, {}, bytes(1 << 22)),
    "busy": (503, {"Retry-After": "0"}, b""),
}


class _Answers(BaseHTTPRequestHandler):
    """Answers by the last name of the path, and counts."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.path)
        status, headers, body = ANSWERS[self.path if self.path in ANSWERS else unquote(self.path[1:])]
        self.send_response(status)
        for name, value in headers.items():
            self._headers_buffer.append(f"{name}: {value}\r\n".encode())  # type: ignore[attr-defined]
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # the client has seen enough
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def answers() -> Iterator[HttpPlace]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        policy = RetryPolicy(budget=0.5, first_contact=0.5)
        yield HttpPlace.of(f"http://127.0.0.1:{server.server_port}", policy=policy)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("address", "an address that is none"),
        ("port", "an address that is none"),
        ("host", "no host can have this name"),
        ("part", "status 206"),
        ("unchanged", "status 304"),
        ("condition", "status 412"),
        ("no range", "status 416"),
        ("coded", "coded bytes"),
    ],
)
def test_answers_that_are_none_to_a_request_are_refused(name: str, words: str, answers: HttpPlace) -> None:
    for read in (answers.read, lambda key: answers.read_if_changed(key, Version(None, None))):
        with pytest.raises(StoreError, match=words):
            read(name)


def test_pages_of_any_kind_say_that_there_is_no_object(answers: HttpPlace) -> None:
    assert [answers.read(f"{kind} page of no object") for kind in ("coded", "long")] == [None, None]


def test_an_address_of_other_letters_is_followed(answers: HttpPlace) -> None:
    there = answers.read("letters")
    assert there is not None
    assert there[0] == b"there"


def test_a_server_that_says_at_once_is_not_asked_without_a_pause(answers: HttpPlace) -> None:
    _Answers.seen.clear()
    with pytest.raises(StoreError, match="status 503"):
        answers.read("busy")
    assert 2 <= len(_Answers.seen) < 8


def test_connections_of_a_place_in_a_cycle_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the garbage collector comes to the connection before it comes to the place."""
    (tmp_path / "head.json").write_bytes(b"{}")
    with static_server(tmp_path) as url:
        older = [HTTPConnection(urlsplit(url).hostname or "", urlsplit(url).port)]
        older[0].connect()
        monkeypatch.setattr(http_client, "HTTPConnection", lambda *where, timeout: older.pop())
        place = HttpPlace.of(url)
        assert place.read("head.json") is not None
        cycle: list[object] = [place]
        cycle.append(cycle)
        del place, cycle
        gc.collect()  # a socket that it closes is a warning, which fails the test
