"""The reader's end of a connection to a listener: who is there, and the proof of the token."""

import json
import os
import socket
import ssl
from contextlib import suppress

from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.stores import wire
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.http_client import CERTIFICATE, TOKEN, TOKEN_FILE, Credentials
from ckpt_formats.stores.wire import ERRORS, FrameKind, PeerGone

SECONDS = 60.0
"""How long to wait for an answer."""

_TOKEN_HINT = f"The command takes it from {TOKEN}, or from the file that {TOKEN_FILE} names."
_TLS_HINT = f"Other machines need TLS. {CERTIFICATE} names the file of certificates to trust."


class Connection:
    """A connection after its login. Threads must not share one.

    where: The address, for messages.
    """

    def __init__(
        self, address: NetworkAddress, credentials: Credentials, listener: str = "shadow", seconds: float = SECONDS
    ) -> None:
        """Connect, with TLS unless the listener is on this machine and no certificate is given.

        `listener`: what is there, for messages; `seconds`: how long to wait for the connection, and for each answer.

        Raises `NotFoundError` if nobody listens, `UnsupportedError` if the token is refused, `UnsafeError` for a
        certificate that is not trusted, and `CorruptError` for an answer that is not a shadow's.
        """
        self.where = f"tcp://{address}"
        self._listener, self._seconds = listener, seconds
        self._socket = _connect(address, credentials, self.where, listener, seconds)
        try:
            self._log_in(credentials)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection: the other side goes on. A thread that waits for an answer gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, kind: FrameKind, body: bytes) -> None:
        """Send a request. Raises the error that the other side named before it left, else `IncompleteError`."""
        try:
            wire.send(self._socket, kind, body, self._seconds)
        except PeerGone as error:
            raise self._refusal() or IncompleteError(error.what, where=self.where) from None

    def receive(self, expected: FrameKind, max_nbytes: int, seconds: float | None = None) -> bytearray:
        """The body of the answer. Raises `CorruptError`, `IncompleteError`, and the error that the other side names."""
        try:
            kind, body = wire.receive(self._socket, max(max_nbytes, wire.MAX_REQUEST), seconds or self._seconds)
        except PeerGone as error:
            raise IncompleteError(error.what, where=self.where, hint=f"Is the {self._listener} still there?") from None
        except CorruptError as error:
            raise CorruptError(error.what, where=self.where) from None
        if kind is FrameKind.ERROR:
            raise self._error(body)
        if kind is not expected:
            raise CorruptError(f"the {self._listener} sent {kind.name} instead of {expected.name}", where=self.where)
        return body

    def _log_in(self, credentials: Credentials) -> None:
        hello = self.receive(FrameKind.HELLO, wire.MAX_REQUEST)
        try:
            fields = json.loads(hello)
            protocol, nonce, demands = fields["protocol"], bytes.fromhex(fields["nonce"]), bool(fields["token"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CorruptError(f"not a {self._listener}'s greeting", where=self.where) from None
        if protocol != wire.PROTOCOL:
            raise UnsupportedError(
                f"the {self._listener} speaks protocol {protocol!r:.20}, not {wire.PROTOCOL}", where=self.where
            )
        if demands and credentials.token is None:
            raise UnsupportedError(f"the {self._listener} demands a token", where=self.where, hint=_TOKEN_HINT)
        own = os.urandom(wire.NONCE)
        proof = b"" if credentials.token is None else wire.proof(credentials.token, nonce, own)
        self.send(FrameKind.LOGIN, json.dumps({"nonce": own.hex(), "proof": proof.hex()}).encode())

    def _refusal(self) -> CkptError | None:
        """The error that the other side has sent before it closed the connection; None if there is none."""
        with suppress(PeerGone, CorruptError):
            kind, body = wire.receive(self._socket, wire.MAX_REQUEST, self._seconds)
            return self._error(body) if kind is FrameKind.ERROR else None
        return None

    def _error(self, body: bytearray) -> CkptError:
        try:
            fields = json.loads(body)
            kind, what, hint = ERRORS[fields["kind"]], str(fields["what"]), fields["hint"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return CorruptError(f"the {self._listener} sent an error that cannot be read", where=self.where)
        return kind(what, where=self.where, hint=None if hint is None else str(hint))


def _connect(
    address: NetworkAddress, credentials: Credentials, where: str, listener: str, seconds: float
) -> socket.socket:
    try:
        plain = socket.create_connection((address.host, address.port), seconds)
    except OSError as error:
        raise NotFoundError(f"no {listener} can be reached: {error.strerror or error}", where=where) from None
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.is_loopback and credentials.certificate is None:
            return plain
        context = ssl.create_default_context(cafile=credentials.certificate)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context.wrap_socket(plain, server_hostname=address.host)
    except CkptError:
        raise
    except ssl.SSLError as error:
        plain.close()
        raise UnsafeError(
            f"the {listener} is not trusted: {error.reason or error}", where=where, hint=_TLS_HINT
        ) from None
    except OSError as error:
        plain.close()
        raise NotFoundError(f"TLS fails: {error.strerror or error}", where=where, hint=_TLS_HINT) from None
