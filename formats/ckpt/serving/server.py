"""Serve the files of a chain over HTTP/1.1. Nothing is computed from them, and nobody can change anything.

    GET /NAME/published/head.json      a file, also by HEAD, with Range, If-Range, If-Match, If-None-Match (RFC 9110)
    GET /NAME/step-0000000012/0?v=TAG  this version of it, which a cache may keep for ever; if it is another, status 412
    GET /NAME/gradients-0000000000/?list
                                       all files below a folder, and the e_tag of chain.json: JSON,
                                       {"format": "ckpt-list", "chain": E_TAG, "files": {NAME: [NBYTES, E_TAG]}}

With `Prefer: wait=SECONDS` (RFC 7240) and If-None-Match, the answer comes as soon as the file or the list is another
one. `Authorization: Bearer TOKEN` is demanded if the server has a token.
"""

import hmac
import json
import re
import socket
import ssl
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, quote, unquote

import xxhash

from ckpt.serving.chain_files import ChainFiles, FileVersion, Lifetime, OpenedFile
from ckpt_formats.core.arguments import StrPath
from ckpt_formats.core.errors import CkptError, NotFoundError, UnsupportedError
from ckpt_formats.core.place import Place
from ckpt_formats.core.version import VERSION
from ckpt_formats.stores.address import NetworkAddress, listening_socket
from ckpt_formats.stores.location import read_place

MAX_PEERS = 256
"""Connections at the same time. More are closed at once."""
LOGIN_SECONDS = 10.0
"""The time that a peer has for TLS and the first request that shows the token, together."""
IDLE_SECONDS = 120.0
"""How long a peer may stay without a request."""
SEND_SECONDS = 60.0
"""The time in which a peer must take an answer, besides that for its bytes."""
MAX_WAIT = 30.0
"""How long an answer may wait for a change. Servers in between give up after a minute."""
LIST_FORMAT = "ckpt-list"
"""The format of a list of files."""
_SLOWEST = 1 << 14
"""Bytes a second that a peer must take."""
_SHORTEST, _LONGEST = 0.001, 0.05
"""Seconds between two looks at files: twice as long each time."""
_SHARE = 4
"""How many times as long as a look takes the pause after it is."""
_CHECK_SECONDS = 0.1
_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))")
_WAIT = re.compile(r"(?:^|[,;\s])wait=(\d{1,4}(?:\.\d{1,6})?)")
_MAX_FIELDS = 8
_CACHING = {
    Lifetime.IMMUTABLE: "public, max-age=31536000, immutable",
    Lifetime.REPLACED: "no-cache",
    Lifetime.GROWING: "no-store",
}


class ChainServer:
    """Listens for readers of a chain, each in a thread, until it is closed."""

    def __init__(
        self, chain: StrPath, address: NetworkAddress, token: bytes | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen at once. `chain`: a folder, or the URL of one in a bucket.

        Raises as `listening_socket`, `NotFoundError` if there is no chain, and `UnsupportedError` for another URL.
        """
        files, name = _files_of(chain)
        self._served = _Served(files, name, token)
        self._tls = tls
        self._peers = threading.BoundedSemaphore(MAX_PEERS)
        self._socket, self.address = listening_socket(address, token, tls)
        for work in (self._accept, self._end_late_peers):
            threading.Thread(target=work, name="ckpt-serve", daemon=True).start()

    @property
    def url(self) -> str:
        """The URL of the chain."""
        return f"{'http' if self._tls is None else 'https'}://{self.address}/{quote(self._served.name)}"

    def close(self) -> None:
        """End all connections, and accept no more."""
        self._served.closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for peer in list(self._served.deadlines):
            _end(peer)

    def _accept(self) -> None:
        while not self._served.closed.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError:
                self._served.closed.wait(_CHECK_SECONDS)  # for example, too many files are open
                continue
            if not self._peers.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), name="ckpt-serve-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        """The life of a connection. Whatever a peer sends, only this connection ends."""
        deadlines, plain = self._served.deadlines, peer
        try:
            deadlines[plain] = time.monotonic() + LOGIN_SECONDS
            with suppress(OSError):
                peer.settimeout(LOGIN_SECONDS)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    peer = self._tls.wrap_socket(peer, server_side=True)
                    deadlines[peer] = deadlines.pop(plain)
                peer.settimeout(max(IDLE_SECONDS, SEND_SECONDS))
                _Peer(peer, self._served)
        finally:
            for one in (plain, peer):
                deadlines.pop(one, None)
            with suppress(OSError):
                peer.close()
            self._peers.release()

    def _end_late_peers(self) -> None:
        """End connections whose peer did not do in time what it should."""
        while not self._served.closed.wait(_CHECK_SECONDS):
            now = time.monotonic()
            for peer, deadline in list(self._served.deadlines.items()):
                if now > deadline:
                    _end(peer)


def _files_of(chain: StrPath) -> tuple[ChainFiles, str]:
    """The files of a chain, and the name under which they are served."""
    place = read_place(chain)
    local = place.local if isinstance(place, Place) else None
    if local is not None:
        return ChainFiles(local), local.absolute().name
    if not isinstance(place, Place):
        raise UnsupportedError(
            "is a web server already", where=place.where(), hint="Put a cache in front of it, such as nginx."
        )
    from ckpt.serving.stored_files import StoredChainFiles  # only if there is a store

    return StoredChainFiles(place), place.where().rstrip("/").rpartition("/")[2]


class _Served:
    """What the threads of a server share."""

    def __init__(self, files: ChainFiles, name: str, token: bytes | None) -> None:
        self.files, self.name = files, name
        self.expected = None if token is None else b"Bearer " + token
        self.closed = threading.Event()
        self.deadlines: dict[socket.socket, float] = {}
        """By when each peer must have sent its next request, or taken its answer."""


@dataclass(frozen=True)
class _FileRequest:
    """A request of the files of a chain."""

    name: str
    """Of a file or folder, as in the chain."""
    is_list: bool
    e_tag: str | None
    """Of the only version that is wanted."""
    known: str | None
    """The e_tags of which the peer has the content."""
    seconds: float
    """How long to wait for another one."""


class _Peer(BaseHTTPRequestHandler):
    """A connection. Its constructor answers all requests."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = f"ckpt/{VERSION}", ""

    def __init__(self, peer: socket.socket, served: _Served) -> None:
        self._served = served
        super().__init__(peer, ("", 0), None)  # type: ignore[arg-type]  # nothing of a server is used

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the library prints nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (OSError, ValueError):  # the peer is gone, or was ended
            self.close_connection = True
        deadlines = self._served.deadlines
        if self.connection in deadlines:
            deadlines[self.connection] = time.monotonic() + (LOGIN_SECONDS if self.close_connection else IDLE_SECONDS)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request of this protocol, and end the connection."""
        self._refuse(HTTPStatus(code), message or "refused")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        expected = self._served.expected
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if expected is not None and not hmac.compare_digest(given, expected):
            self._refuse(HTTPStatus.UNAUTHORIZED, "the token is missing, or is not the server's")
            return
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.BAD_REQUEST, "a request with a body")
            return
        try:
            request = _parsed(self.path, self.headers, self._served.name)
            self._allow(request.seconds)
            if request.is_list:
                self._send_list(request)
            else:
                self._send_file(request)
        except NotFoundError as error:
            self._answer(HTTPStatus.NOT_FOUND, error.what.encode(), {"Cache-Control": "no-store"})
        except CkptError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, error.what)

    def _allow(self, seconds: float, nbytes: int = 0) -> None:
        """Give the peer so many seconds, and time for its bytes."""
        if self.connection in self._served.deadlines:
            allowed = seconds + SEND_SECONDS + nbytes / _SLOWEST
            self._served.deadlines[self.connection] = time.monotonic() + allowed

    def _send_list(self, request: _FileRequest) -> None:
        files, deadline, pause = self._served.files, time.monotonic() + request.seconds, _SHORTEST
        while True:
            began = time.monotonic()
            rows = {name: [one.nbytes, one.e_tag] for name, one in files.list(request.name).items()}
            content = json.dumps({"format": LIST_FORMAT, "chain": files.list_tag(), "files": rows}).encode()
            e_tag = f'"{xxhash.xxh3_128_hexdigest(content)}"'
            now = time.monotonic()
            if not _has(request.known, e_tag) or now >= deadline:
                break
            self._served.closed.wait(min(max(pause, _SHARE * (now - began)), deadline - now))
            pause = min(2 * pause, _LONGEST)
        headers = {"ETag": e_tag, "Cache-Control": "no-cache", "Content-Type": "application/json"}
        if _has(request.known, e_tag):
            self._answer(HTTPStatus.NOT_MODIFIED, b"", headers)
        else:
            self._allow(0, len(content))
            self._answer(HTTPStatus.OK, content, headers)

    def _send_file(self, request: _FileRequest) -> None:
        deadline, pause = time.monotonic() + request.seconds, _SHORTEST
        while True:
            file = self._served.files.open(request.name)
            version, lifetime = file.version, file.lifetime
            is_known = lifetime is not Lifetime.GROWING and _has(request.known, version.e_tag)
            now = time.monotonic()
            if not is_known or now >= deadline:
                break
            file.close()
            self._served.closed.wait(min(pause, deadline - now))
            pause = min(2 * pause, _LONGEST)
        with closing(file):
            headers = {"ETag": version.e_tag, "Accept-Ranges": "bytes", "Cache-Control": _CACHING[lifetime]}
            match = self.headers.get("If-Match")
            if (match is not None and not _has(match, version.e_tag)) or request.e_tag not in (None, version.e_tag):
                self._answer(HTTPStatus.PRECONDITION_FAILED, b"another version", {"Cache-Control": "no-store"})
                return
            if request.e_tag is not None and lifetime is Lifetime.REPLACED:
                headers["Cache-Control"] = _CACHING[Lifetime.IMMUTABLE]
            if is_known:
                self._answer(HTTPStatus.NOT_MODIFIED, b"", headers)
                return
            begin, end, code = self._range(version)
            if code is HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                self._answer(code, b"", {"Content-Range": f"bytes */{version.nbytes}", "Cache-Control": "no-store"})
                return
            if code is HTTPStatus.PARTIAL_CONTENT:
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{version.nbytes}"
            headers["Content-Type"] = "application/octet-stream"
            self._allow(0, end - begin)
            self._head(code, end - begin, headers)
            if self.command == "GET" and end > begin and not self._sent(file, begin, end):
                self.close_connection = True  # the peer sees that bytes are missing

    def _sent(self, file: OpenedFile, begin: int, end: int) -> bool:
        """Send a range of a file. Returns whether the file still had all bytes."""
        try:
            return file.send(self.connection, begin, end)
        except CkptError:
            return False

    def _range(self, version: FileVersion) -> tuple[int, int, HTTPStatus]:
        """The first byte to send, the one after the last, and the status. Several ranges are answered by all bytes."""
        match = _RANGE.fullmatch(self.headers.get("Range", "").strip())
        if match is None or self.headers.get("If-Range", version.e_tag) != version.e_tag:
            return 0, version.nbytes, HTTPStatus.OK
        first, last, suffix = match.groups()
        if suffix is not None:
            begin, end = max(0, version.nbytes - int(suffix)), version.nbytes
        else:
            begin, end = int(first), min(int(last) + 1 if last else version.nbytes, version.nbytes)
        is_there = begin < end
        return begin, end, HTTPStatus.PARTIAL_CONTENT if is_there else HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer, and end the connection: what the peer sent may not have been read."""
        self.close_connection = True
        if self.connection in self._served.deadlines:
            self._served.deadlines[self.connection] = time.monotonic() + LOGIN_SECONDS
        headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else {}
        self._answer(status, text.encode(), {**headers, "Cache-Control": "no-store", "Connection": "close"})

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self._head(status, len(body), {"Content-Type": "text/plain", **headers})
        if self.command != "HEAD" and body:
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, nbytes: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        self.send_header("Server", self.server_version)
        self.send_header("Date", self.date_time_string())
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(nbytes))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _parsed(target: str, headers: Message, served: str) -> _FileRequest:
    """The request in the line and the headers of a message. Raises `NotFoundError` for a path outside of the chain."""
    path, _, query = target.partition("?")
    mark, name, *rest = (unquote(one) for one in path.split("/")) if "/" in path else ("", "")
    if mark or name != served or any("/" in one for one in rest):
        raise NotFoundError(f"nothing is served there; the chain is at /{quote(served)}/")
    try:
        fields = parse_qs(query, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise NotFoundError("this server does not know the query") from None
    is_list = "list" in fields
    wait = _WAIT.search(headers.get("Prefer", ""))
    return _FileRequest(
        "/".join(one for one in rest if one) if is_list else "/".join(rest),
        is_list,
        fields["v"][0] if "v" in fields else None,
        headers.get("If-None-Match"),
        0.0 if wait is None else min(float(wait[1]), MAX_WAIT),
    )


def _has(header: str | None, e_tag: str) -> bool:
    """Whether a list of e_tags has one."""
    tags = [] if header is None else [one.strip() for one in header.split(",")]
    return "*" in tags or any(one.removeprefix("W/") == e_tag for one in tags)


def _end(peer: socket.socket) -> None:
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
