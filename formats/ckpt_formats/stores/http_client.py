"""Requests over HTTP and HTTPS to one server: connections that stay open, verified TLS, a token, and proxies.

The library of Python is used, so that reading from a web server needs no further package.
"""

import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, RemoteDisconnected
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import finalize

from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CkptError, InvalidArgumentError, NotFoundError, UnsafeError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.place import too_large
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.core.text import printable
from ckpt_formats.core.version import VERSION
from ckpt_formats.stores.repetition import Repetition, Transient, retry_after

TOKEN, TOKEN_FILE, CERTIFICATE = "CKPT_TOKEN", "CKPT_TOKEN_FILE", "CKPT_CERTIFICATE"
"""Variables of the environment."""
_MAX_TOKEN = 1 << 12
_MAX_REDIRECTS = 5
_IDLE = 15.0
"""Seconds after which a connection is not used again: servers close those that are idle."""
_PART = 1 << 20
_CONNECT = 10.0
"""Seconds in which a connection must be there."""
_SLOWEST = 1 << 14
"""Bytes a second of a body that is not given up."""
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_REDIRECTS = (301, 302, 303, 307, 308)
_TOKEN_HINT = f"Set {TOKEN}, or {TOKEN_FILE} to the path of a file, to the token of the server."
_TLS_HINT = f"{CERTIFICATE} names the file of certificates to trust, if not those of the system."


@dataclass(frozen=True)
class Credentials:
    """How to be let in by a server, and how to know that it is the right one."""

    token: bytes | None = field(default=None, repr=False)
    certificate: Path | None = None
    """A file with the certificates (PEM) of the server, or of who signed its own; None: those of the system."""

    @classmethod
    def of_user(cls) -> "Credentials":
        """Those of the environment: `CKPT_TOKEN` or `CKPT_TOKEN_FILE`, and `CKPT_CERTIFICATE`.

        Raises `NotFoundError` if a file does not exist.
        """
        certificate, file = os.environ.get(CERTIFICATE), os.environ.get(TOKEN_FILE)
        token = read_whole(Path(file), _MAX_TOKEN) if file else os.fsencode(os.environ.get(TOKEN, ""))
        return cls(token.strip() or None, Path(certificate) if certificate else None)


NO_CREDENTIALS = Credentials()


@dataclass(frozen=True)
class HttpAnswer:
    """The answer of a server."""

    status: int
    headers: Mapping[str, str]
    """By their names, in lower case."""
    body: memoryview


Sink = Callable[[memoryview], None]
"""What takes the parts of a body as they arrive."""
SinkOf = Callable[[HttpAnswer], Sink]
"""Gives the sink for a success, of which the body is empty still; or raises, if it is not what was requested."""


class HttpClient:
    """Requests to one server. Threads may share it; each request takes a connection of its own."""

    def __init__(self, origin: str, credentials: Credentials, repeated: Repetition) -> None:
        """`origin`: such as `https://host:8443`.

        Raises `UnsafeError` if the token would be sent to another machine without TLS, `InvalidArgumentError` for a
        token of other than printable ASCII characters, and as `_context`.
        """
        parts = urlsplit(origin)
        token = credentials.token
        if token is not None and not (token.isascii() and token.decode("latin-1").isprintable()):
            raise InvalidArgumentError("the token has characters that no header can have", hint=_TOKEN_HINT)
        self.origin = origin
        self._host, self._port, self._is_tls = parts.hostname or "", parts.port, parts.scheme == "https"
        if token is not None and not self._is_tls and not is_loopback(self._host):
            raise UnsafeError(
                "the token would be sent without TLS, for anybody between to read",
                where=origin,
                hint=f"Use https://, or unset {TOKEN} and {TOKEN_FILE}.",
            )
        self._credentials, self._repeated = credentials, repeated
        self._context = _context(credentials.certificate) if self._is_tls else None
        self._idle: list[tuple[HTTPConnection, float]] = []
        self._running = set[socket.socket]()
        self._process, self._lock = os.getpid(), Lock()
        # Not `__del__`: of a client in a cycle, the garbage collector might end the sockets before it.
        finalize(self, _close, self._idle)

    def get(
        self,
        path: str,
        headers: Mapping[str, str] = {},
        max_nbytes: int = MAX_LIST,
        *,
        method: str = "GET",
        seconds: float = 0.0,
        sink_of: SinkOf | None = None,
    ) -> HttpAnswer:
        """The answer to a request, which is repeated if the line fails or the server says that it may succeed later.

        `path`: with its leading slash, quoted. `max_nbytes`: of a body; one that has more raises `UnsafeError`.
        `seconds`: for how long the server may wait before it answers. `sink_of`: gives what takes the body of a
        success, which is not kept; then nothing is repeated. Raises `StoreError` in the end, or if the server refuses.
        """
        request = _HttpRequest(method, path, headers, max_nbytes, seconds, sink_of)
        where = f"{self.origin}{path.partition('?')[0]}"
        if sink_of is None:
            return self._repeated(lambda: self._redirected(request), where)
        try:
            return self._redirected(request)
        except Transient as error:
            raise StoreError(error.text, where, error.hint) from None
        except _SinkFailed as error:
            raise error.error from None

    def close(self) -> None:
        """Close all connections. A thread that waits for an answer gets an error."""
        with self._lock:
            for running in list(self._running):
                with suppress(OSError):
                    running.shutdown(socket.SHUT_RDWR)
        _close(self._idle)

    def _redirected(self, request: "_HttpRequest") -> HttpAnswer:
        """The answer to a request, here or where a server sends it. Another server gets no token."""
        client, where = self, f"{self.origin}{request.path}"
        for _ in range(_MAX_REDIRECTS):
            answer = client._once(request)
            location = answer.headers.get("location")
            if answer.status not in _REDIRECTS or location is None:
                _check(answer, where)
                return answer
            target = _target_of(f"{client.origin}{request.path}", location, where)
            origin = f"{target.scheme}://{target.netloc}"
            if target.scheme not in ("http", "https") or (client._is_tls and target.scheme == "http"):
                raise StoreError("the server sends to an address that is not secure", printable(where))
            request = replace(request, path=f"{target.path or '/'}{'?' if target.query else ''}{target.query}")
            if origin != client.origin:
                client = HttpClient(origin, Credentials(None, self._credentials.certificate), self._repeated)
        raise StoreError("the server sends from one address to another, without end", printable(where))

    def _once(self, request: "_HttpRequest") -> HttpAnswer:
        silence = self._repeated.policy.silence
        while True:
            connection, is_used = self._connection()
            running, response = None, None
            try:
                headers = {**self._headers(), **request.headers}
                connection.request(request.method, self._target(request.path), headers=headers)
                running = connection.sock
                self._running.add(running)
                running.settimeout(silence + request.seconds)
                response = connection.getresponse()
                running.settimeout(silence)
                answer = self._answer(response, request)
                self._give_back(connection, response)
                return answer
            except BaseException as error:
                is_unreached = running is None and connection.sock is None
                connection.close()
                if response is not None:
                    response.close()
                if isinstance(error, ssl.SSLCertVerificationError):
                    text = f"the server is not trusted: {error.verify_message or error.reason}"
                    raise UnsafeError(text, where=self.origin, hint=_TLS_HINT) from None
                if isinstance(error, (CkptError, StoreError)) or not isinstance(
                    error, (OSError, HTTPException, UnicodeError)
                ):
                    raise
                if isinstance(error, UnicodeError):
                    raise StoreError("no host can have this name", printable(self.origin)) from None
                if is_used and response is None:
                    continue  # the server has closed it meanwhile
                raise _failed(error, is_unreached) from None
            finally:
                if running is not None:
                    self._running.discard(running)

    def _headers(self) -> dict[str, str]:
        headers = {"User-Agent": f"ckpt/{VERSION}", "Accept-Encoding": "identity"}
        if self._credentials.token is not None:
            headers["Authorization"] = f"Bearer {self._credentials.token.decode('latin-1')}"
        return headers

    def _target(self, path: str) -> str:
        """What the line of a request names: to a proxy without TLS, all of the URL."""
        return path if self._is_tls or self._proxy() is None else f"{self.origin}{path}"

    def _proxy(self) -> tuple[str, int] | None:
        """The proxy that the environment names for this server."""
        if is_loopback(self._host):
            return None
        address = getproxies().get("https" if self._is_tls else "http")
        if not address or proxy_bypass(self._host):
            return None
        parts = urlsplit(address if "://" in address else f"http://{address}")
        return parts.hostname or "", parts.port or 80

    def _connection(self) -> tuple[HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with self._lock:
            if self._process != os.getpid():  # those of the process that forked this one are its own
                _close(self._idle)
                self._process = os.getpid()
            while self._idle:
                connection, since = self._idle.pop()
                if time.monotonic() - since < _IDLE:
                    return connection, True
                connection.close()
        proxy = self._proxy()
        host, port = (self._host, self._port) if proxy is None else proxy
        if self._context is None:
            connection = HTTPConnection(host, port, timeout=_CONNECT)
        else:
            connection = HTTPSConnection(host, port, context=self._context, timeout=_CONNECT)
            if proxy is not None:
                connection.set_tunnel(self._host, self._port or 443)
        connection.response_class = _WholeHead
        return connection, False

    def _give_back(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        if response.will_close or not response.isclosed():
            connection.close()
            return
        with self._lock:
            self._idle.append((connection, time.monotonic()))

    def _answer(self, response: HTTPResponse, request: "_HttpRequest") -> HttpAnswer:
        """The whole of an answer. Raises `UnsafeError` if it is longer than it may be."""
        where = f"{self.origin}{request.path.partition('?')[0]}"
        headers = {name.lower(): value for name, value in response.getheaders()}
        is_success = response.status in (200, 206)
        if is_success and headers.get("content-encoding", "identity") != "identity":
            raise Transient("the server answers with coded bytes, which were not requested", is_wrong=True)
        limit = request.max_nbytes if is_success else min(request.max_nbytes, _PART)
        if response.length is not None and response.length > limit and is_success:
            raise too_large(response.length, limit, where)
        sink: Sink | None = None
        if is_success and request.sink_of is not None:
            sink = request.sink_of(HttpAnswer(response.status, headers, memoryview(b"")))
        deadline = time.monotonic() + self._repeated.policy.silence + (response.length or limit) / _SLOWEST
        known = response.length if sink is None and is_success else None
        body, total = bytearray(known or 0), 0
        part = memoryview(bytearray(_PART)) if known is None else memoryview(b"")
        while nbytes := response.readinto(part if known is None else memoryview(body)[total : total + _PART]):
            total += nbytes
            if total > limit:
                if not is_success:
                    break
                raise too_large(None, limit, where)
            if time.monotonic() > deadline:
                raise Transient("the server is too slow")
            if sink is not None:
                _pass_on(sink, part[:nbytes])
            elif known is None:
                body += part[:nbytes]
        if response.length and total <= limit:  # what was announced, and did not come
            raise Transient("the server ended the connection within an answer")
        return HttpAnswer(response.status, headers, memoryview(body).toreadonly())


@dataclass(frozen=True)
class _HttpRequest:
    """A request, as of `HttpClient.get`."""

    method: str
    path: str
    headers: Mapping[str, str]
    max_nbytes: int
    seconds: float
    sink_of: SinkOf | None


def _close(idle: list[tuple[HTTPConnection, float]]) -> None:
    """Close connections, and empty their list, which other threads may do, too."""
    with suppress(IndexError):
        while True:
            idle.pop()[0].close()


class _WholeHead(HTTPResponse):
    """An answer, of which the library would take the head for whole if the connection ended within it."""

    def begin(self) -> None:
        file = self.fp
        lines: Any = _Lines(file)
        self.fp = lines
        try:
            super().begin()
        finally:
            if self.fp is lines:
                self.fp = file
        if not lines.last:
            raise RemoteDisconnected("the connection ended within the head of an answer")


class _Lines:
    """A file, and the last line that was read of it."""

    def __init__(self, file: Any) -> None:
        self.file, self.last = file, b""

    def readline(self, limit: int) -> bytes:
        self.last = self.file.readline(limit)
        return self.last

    def close(self) -> None:
        self.file.close()


class _SinkFailed(Exception):
    """What takes a body has raised `error`, which is none of the line."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _pass_on(sink: Sink, part: memoryview) -> None:
    try:
        sink(part)
    except OSError as error:
        raise _SinkFailed(error) from None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _context(certificate: Path | None) -> ssl.SSLContext:
    """TLS that verifies the server. Raises `NotFoundError`, `InvalidArgumentError` for a file that cannot be used."""
    if certificate is not None and not certificate.exists():
        raise NotFoundError("there is nothing at this path", where=certificate, hint=f"Check {CERTIFICATE}.")
    try:
        context = ssl.create_default_context(cafile=certificate)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"has no certificates: {error}", where=certificate, hint=_TLS_HINT) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _target_of(here: str, location: str, where: str) -> SplitResult:
    """Where a server sends to, as a request can name it. Raises `StoreError` for what is no address."""
    try:
        target = urlsplit(urljoin(here, location))
        target.port  # noqa: B018
    except ValueError:
        raise StoreError("the server sends to an address that is none", printable(where)) from None
    # Heads have Latin-1 for the library, so these are the bytes that the server has sent.
    path, query = (quote(part, "/%:@!$&'()*+,;=~?", "latin-1", "replace") for part in (target.path, target.query))
    return target._replace(path=path, query=query)


def _check(answer: HttpAnswer, where: str) -> None:
    """Raise `Transient` or `StoreError` for an answer that is neither a success, an absence nor on a condition."""
    status = answer.status
    if status in (401, 403):
        raise StoreError(f"the server refuses: status {status}", printable(where), _TOKEN_HINT, is_denied=True)
    if status in _PASSING:
        text = f"the server answers with status {status}"
        raise Transient(text, status in (429, 503), retry_after(answer.headers))
    if status not in (200, 206, 304, 404, 410, 412, 416):
        raise StoreError(f"the server answers with status {status}", printable(where))


def _failed(error: Exception, is_unreached: bool) -> Transient:
    """Why there is no answer."""
    if isinstance(error, TimeoutError):
        return Transient("the server does not answer in time", is_unreached=is_unreached)
    detail = getattr(error, "strerror", None) or getattr(error, "reason", None) or type(error).__name__
    what = "cannot be reached" if is_unreached else "ended the connection"
    return Transient(f"the server {what}: {printable(str(detail))[:200]}", is_unreached=is_unreached)
