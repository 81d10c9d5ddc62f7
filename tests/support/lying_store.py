"""A store in this process that speaks the protocol of S3, and lies.

It keeps objects in memory and answers honestly unless it is given a lie: a function that gets each request, with the
store that knows the truth, and alters the request, the answer or the objects. Tables of lies are in `lies_of_writing`
and `lies_of_reading`; `ckpt/test_lying_stores.py` tries each with each operation.
"""

import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import time
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from object_stores import BUCKET, StoreServer

_META = "x-amz-meta-"


@dataclass(frozen=True)
class Request:
    """A request for the bucket."""

    method: str
    key: str
    """The key of the object; empty for the bucket itself, such as in a listing."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes

    @property
    def kind(self) -> str:
        """What it asks for: `get`, `head`, `put`, `delete`, `list`, `bulk delete`, `begin`, `part`, `complete`,
        `abort`, `list uploads`."""
        if not self.key:
            if self.method == "POST":
                return "bulk delete"
            return "list uploads" if "uploads" in self.query else "list"
        if "uploads" in self.query:
            return "begin"
        if "uploadId" in self.query:
            return {"PUT": "part", "POST": "complete"}.get(self.method, "abort")
        return self.method.lower()

    def without(self, *headers: str) -> "Request":
        """The request without some headers."""
        return replace(self, headers={name: value for name, value in self.headers.items() if name not in headers})


@dataclass(frozen=True)
class Answer:
    """An answer to a request."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    length: int | None = None
    """The `Content-Length`; None: that of the body."""
    breaks: bool = False
    """Whether the connection ends after the body, or, without a status (0), instead of an answer."""

    def with_headers(self, **headers: str) -> "Answer":
        """The answer with some headers replaced; an underscore stands for a hyphen."""
        return replace(self, headers={**self.headers, **{k.replace("_", "-"): v for k, v in headers.items()}})


LOST = Answer(0, breaks=True)
"""No answer: the connection breaks."""
Handler = Callable[[Request], Answer]
Lie = Callable[["MemoryStore"], Handler]
"""How a store lies: for each case of a test it gives the function that answers requests."""


def failure(status: int, code: str, message: str = "the tests say so") -> Answer:
    """An error, as S3 words it."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, {"content-type": "application/xml"}, body.encode())


@dataclass(frozen=True)
class Object:
    """An object in the store."""

    data: bytes
    e_tag: str
    """With quotation marks, as headers have it."""
    modified: float
    attributes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: bytes, attributes: Mapping[str, str] | None = None) -> "Object":
        return cls(data, f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"', time(), attributes or {})


class MemoryStore:
    """A bucket in memory, which answers honestly."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        """Uploads in parts that are not complete: the key, and the parts by their numbers."""
        self.seen: list[Request] = []
        self.lock = threading.RLock()

    def put(self, key: str, data: bytes, attributes: Mapping[str, str] | None = None) -> Object:
        """Store an object, whatever is there."""
        self.objects[key] = Object.of(data, attributes)
        return self.objects[key]

    def below(self, prefix: str) -> dict[str, bytes]:
        """The bytes of all objects below a folder, by their paths from there."""
        return {key[len(prefix) + 1 :]: one.data for key, one in self.objects.items() if key.startswith(f"{prefix}/")}

    def answer(self, request: Request) -> Answer:
        """What an honest store does."""
        with self.lock:
            act: Handler = getattr(self, f"_{request.kind.replace(' ', '_')}")
            return act(request)

    def _get(self, request: Request) -> Answer:
        there = self.objects.get(request.key)
        if there is None:
            return failure(404, "NoSuchKey")
        if request.headers.get("if-match", there.e_tag) not in (there.e_tag, there.e_tag.strip('"'), "*"):
            return failure(412, "PreconditionFailed")
        headers = described(there)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if wanted is None or request.method == "HEAD":
            return Answer(200, headers, there.data)
        first, last = int(wanted[1]), min(int(wanted[2] or len(there.data)), len(there.data) - 1)
        if first > last:
            return failure(416, "InvalidRange")
        headers["content-range"] = f"bytes {first}-{last}/{len(there.data)}"
        return Answer(206, headers, there.data[first : last + 1])

    def _head(self, request: Request) -> Answer:
        answer = self._get(request)
        return replace(answer, body=b"", length=len(answer.body) if answer.status < 300 else 0)

    def _refused(self, request: Request) -> Answer | None:
        """The answer if a condition of a request that stores an object does not hold."""
        there, wanted = self.objects.get(request.key), request.headers.get("if-match")
        if request.headers.get("if-none-match") == "*" and there is not None:
            return failure(412, "PreconditionFailed")
        if wanted is not None and there is None:
            return failure(404, "NoSuchKey")
        if wanted is not None and there is not None and wanted.strip('"') != there.e_tag.strip('"'):
            return failure(412, "PreconditionFailed")
        return None

    def _put(self, request: Request) -> Answer:
        refused = self._refused(request)
        if refused is not None:
            return refused
        return Answer(200, {"etag": self.put(request.key, request.body, attributes_in(request)).e_tag})

    def _delete(self, request: Request) -> Answer:
        self.objects.pop(request.key, None)
        return Answer(204)

    def _bulk_delete(self, request: Request) -> Answer:
        keys = keys_in(request)
        for key in keys:
            self.objects.pop(key, None)
        done = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return Answer(200, {}, f"<DeleteResult>{done}</DeleteResult>".encode())

    def _list(self, request: Request) -> Answer:
        return listing(self.objects, request)

    def _begin(self, request: Request) -> Answer:
        upload = f"upload-{len(self.uploads)}-{len(self.seen)}"
        self.uploads[upload] = (request.key, {})
        body = (
            f"<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(request.key)}</Key>"
            f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        )
        return Answer(200, {}, body.encode())

    def _part(self, request: Request) -> Answer:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None:
            return failure(404, "NoSuchUpload")
        upload[1][int(request.query["partNumber"])] = request.body
        return Answer(200, {"etag": Object.of(request.body).e_tag})

    def _complete(self, request: Request) -> Answer:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None:
            return failure(404, "NoSuchUpload")
        refused = self._refused(request)
        if refused is not None:
            return refused
        del self.uploads[request.query["uploadId"]]
        parts = [upload[1][number] for number in sorted(upload[1])]
        digests = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in parts)
        tag = f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'
        self.objects[request.key] = Object(b"".join(parts), tag, time())
        body = (
            f"<CompleteMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(request.key)}</Key>"
            f"<ETag>{escape(tag)}</ETag></CompleteMultipartUploadResult>"
        )
        return Answer(200, {}, body.encode())

    def _abort(self, request: Request) -> Answer:
        self.uploads.pop(request.query["uploadId"], None)
        return Answer(204)

    def _list_uploads(self, request: Request) -> Answer:
        return Answer(200, {}, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")


def described(one: Object) -> dict[str, str]:
    """The headers of an answer about an object."""
    attributes = {f"{_META}{name}": value for name, value in one.attributes.items()}
    return {
        "etag": one.e_tag,
        "last-modified": formatdate(one.modified, usegmt=True),
        "accept-ranges": "bytes",
        **attributes,
    }


def attributes_in(request: Request) -> dict[str, str]:
    """The attributes that a request gives to an object."""
    return {name[len(_META) :]: value for name, value in request.headers.items() if name.startswith(_META)}


def keys_in(request: Request) -> list[str]:
    """The keys that a request for many deletions names."""
    return [one.text or "" for one in ElementTree.fromstring(request.body).iter() if one.tag.endswith("Key")]


def listing(objects: Mapping[str, Object], request: Request) -> Answer:
    """The answer to a request for a listing, of the objects given."""
    prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter")
    after = request.query.get("continuation-token", request.query.get("start-after", ""))
    most, folders, entries = int(request.query.get("max-keys", 1000)), set[str](), list[str]()
    more = last = ""
    for key in sorted(key for key in objects if key.startswith(prefix) and key > after):
        if len(entries) == most:
            more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{last}</NextContinuationToken>"
            break
        last, one = escape(key), objects[key]
        below = key[len(prefix) :]
        if delimiter and delimiter in below:
            folders.add(prefix + below.partition(delimiter)[0] + delimiter)
            continue
        when = iso(one.modified)
        entries.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>{escape(one.e_tag)}</ETag>"
            f"<Size>{len(one.data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )
    common = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
    more = more or "<IsTruncated>false</IsTruncated>"
    head = f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(entries)}</KeyCount>{more}"
    body = f"<ListBucketResult>{head}{''.join(entries)}{common}</ListBucketResult>"
    return Answer(200, {"content-type": "application/xml"}, body.encode())


def iso(seconds: float) -> str:
    """A time as listings have it."""
    from datetime import datetime, timezone

    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class LyingStore:
    """A running server: the truth, and who answers."""

    truth: MemoryStore
    server: StoreServer
    handler: Handler

    def tell(self, lie: Lie) -> None:
        """From now on, lie."""
        self.handler = lie(self.truth)

    def be_honest(self) -> None:
        """From now on, tell the truth."""
        self.handler = self.truth.answer


@contextmanager
def lying() -> Iterator[LyingStore]:
    """A store that is honest until it is told to lie."""
    truth = MemoryStore()
    store = LyingStore(truth, StoreServer(""), truth.answer)

    class Conversation(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _converse(self) -> None:
            request = self._request()
            with truth.lock:
                truth.seen.append(request)
            answer = store.handler(request)
            if answer.status:
                self.wfile.write(self._head(answer) + (b"" if self.command == "HEAD" else answer.body))
            if answer.breaks:
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _converse

        def _request(self) -> Request:
            url = urlsplit(self.path)
            key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            headers = {name.lower(): value for name, value in self.headers.items()}
            return Request(
                self.command, key, query, headers, self.rfile.read(int(self.headers.get("Content-Length") or 0))
            )

        def _head(self, answer: Answer) -> bytes:
            length = len(answer.body) if answer.length is None else answer.length
            reason = HTTPStatus(answer.status).phrase
            lines = [f"HTTP/1.1 {answer.status} {reason}", f"Date: {formatdate(usegmt=True)}"]
            lines += [f"{name}: {value}" for name, value in answer.headers.items()]
            return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode("latin-1")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients end as they like."""

    with Quiet(("127.0.0.1", 0), Conversation) as server:
        store.server = StoreServer(f"http://127.0.0.1:{server.server_address[1]}")
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        try:
            yield store
        finally:
            server.shutdown()
            serving.join()
