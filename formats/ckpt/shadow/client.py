"""Read the state of a shadow that listens at an address: a checkpoint like any other, as long as it is connected."""

import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from ckpt.shadow import described, wire
from ckpt.shadow.wire import ERRORS, FrameKind, NetworkAddress, PeerGone
from ckpt_formats.core.checkpoint import Checkpoint, Edit
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CkptError, Corrupt, Incomplete, NotFound, Unsafe, Unsupported
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, Blob, FileBlob
from ckpt_formats.universal.chunked import read_chunks

SECONDS = 60.0
"""How long to wait for an answer."""


@dataclass(frozen=True)
class Credentials:
    """How to be let in, and how to know that it is the right shadow."""

    token: bytes | None = None
    certificate: Path | None = None
    """A file with the certificates (PEM) of the shadow, or of who signed its own; None: those of the system."""


@dataclass(frozen=True)
class ReadFromShadow(Edit):
    """The checkpoint was read from a shadow. The state of each connection is another one."""

    address: str
    connection: str


class ShadowConnection:
    """A connection to a shadow, which freezes its state until this is closed. Threads may share it.

    checkpoint: The frozen state.
    """

    def __init__(self, address: NetworkAddress, credentials: Credentials = Credentials()) -> None:
        """Connect, with TLS unless the shadow is on this machine and no certificate is given.

        Raises `NotFound` if nobody listens, `Unsupported` if the token is refused, `Unsafe` for a certificate that is
        not trusted, and `Corrupt` for an answer that is not a shadow's.
        """
        self._lock = threading.Lock()
        self._where = f"tcp://{address}"
        self._socket = _connect(address, credentials, self._where)
        try:
            self._log_in(credentials)
            content = self._receive(FrameKind.STATE, wire.MAX_STATE)
            history = (ReadFromShadow(str(address), os.urandom(16).hex()),)
            self.checkpoint: Checkpoint = described.load(content, Path(self._where), self._blob, history)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ShadowConnection":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connection: the shadow goes on. The checkpoint must not be read any more."""
        self._socket.close()

    def values(self, tensor: int, index: int, size: int, dtype: DType) -> Array:
        """A chunk of a tensor: (size,) of `dtype`. Raises `Corrupt`, and `Incomplete` if the shadow is gone."""
        with self._lock:
            try:
                wire.send(self._socket, FrameKind.READ, wire.READ.pack(tensor, index), SECONDS)
            except PeerGone as error:
                raise Incomplete(error.what, where=self._where) from None
            body = self._receive(FrameKind.VALUES, wire.CHUNK_NBYTES)
        if len(body) != size * dtype.itemsize:
            raise Corrupt("the shadow sent a chunk of another size", where=self._where)
        return np.frombuffer(body, dtype)

    def _blob(self, number: int, shape: Shape, dtype: DType) -> Blob:
        return _ShadowBlob(self, number, shape, dtype, Box.whole(shape))

    def _log_in(self, credentials: Credentials) -> None:
        hello = self._receive(FrameKind.HELLO, wire.MAX_REQUEST)
        try:
            fields = json.loads(hello)
            protocol, nonce, demands = fields["protocol"], bytes.fromhex(fields["nonce"]), bool(fields["token"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise Corrupt("not a shadow's greeting", where=self._where) from None
        if protocol != wire.PROTOCOL:
            raise Unsupported(f"the shadow speaks protocol {protocol!r:.20}, not {wire.PROTOCOL}", where=self._where)
        if demands and credentials.token is None:
            raise Unsupported("the shadow demands a token", where=self._where, hint=_TOKEN_HINT)
        own = os.urandom(wire.NONCE)
        proof = b"" if credentials.token is None else wire.proof(credentials.token, nonce, own)
        login = json.dumps({"nonce": own.hex(), "proof": proof.hex()})
        try:
            wire.send(self._socket, FrameKind.LOGIN, login.encode(), SECONDS)
        except PeerGone as error:
            raise Incomplete(error.what, where=self._where) from None

    def _receive(self, expected: FrameKind, max_nbytes: int) -> bytearray:
        try:
            kind, body = wire.receive(self._socket, max(max_nbytes, wire.MAX_REQUEST), SECONDS)
        except PeerGone as error:
            raise Incomplete(error.what, where=self._where, hint="Is the shadow still there?") from None
        except Corrupt as error:
            raise Corrupt(error.what, where=self._where) from None
        if kind is FrameKind.ERROR:
            raise self._error(body)
        if kind is not expected:
            raise Corrupt(f"the shadow sent {kind.name} instead of {expected.name}", where=self._where)
        return body

    def _error(self, body: bytearray) -> CkptError:
        try:
            fields = json.loads(body)
            kind, what, hint = ERRORS[fields["kind"]], str(fields["what"]), fields["hint"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return Corrupt("the shadow sent an error that cannot be read", where=self._where)
        return kind(what, where=self._where, hint=None if hint is None else str(hint))


_TOKEN_HINT = "The command takes it from CKPT_SHADOW_TOKEN, or from the file that CKPT_SHADOW_TOKEN_FILE names."


def _connect(address: NetworkAddress, credentials: Credentials, where: str) -> socket.socket:
    try:
        plain = socket.create_connection((address.host, address.port), SECONDS)
    except OSError as error:
        raise NotFound(f"no shadow can be reached: {error.strerror or error}", where=where) from None
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.is_loopback and credentials.certificate is None:
            return plain
        context = ssl.create_default_context(cafile=credentials.certificate)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context.wrap_socket(plain, server_hostname=address.host)
    except ssl.SSLError as error:
        plain.close()
        raise Unsafe(f"the shadow is not trusted: {error.reason or error}", where=where, hint=_TLS_HINT) from None
    except OSError as error:
        plain.close()
        raise NotFound(f"TLS fails: {error.strerror or error}", where=where, hint=_TLS_HINT) from None


_TLS_HINT = "Shadows on other machines need TLS. CKPT_SHADOW_CERTIFICATE names the file of certificates to trust."


@dataclass(frozen=True, eq=False)
class _ShadowBlob(Blob):
    """A block of a tensor of a shadow."""

    connection: ShadowConnection
    number: int
    full_shape: Shape
    dtype: DType
    box: Box

    @property
    def shape(self) -> Shape:
        return self.box.shape

    def crop(self, box: Box) -> "_ShadowBlob":
        return _ShadowBlob(self.connection, self.number, self.full_shape, self.dtype, box.shift(self.box.start))

    def read_into(self, out: Array, reader: Reader) -> None:
        chunking = Chunking(self.full_shape, (wire.CHUNK_NBYTES // self.dtype.itemsize,))

        def values(index: int) -> Array:
            start, stop = chunking.range(index)
            key = (id(self.connection), self.number, index)
            return reader.cached_or(key, lambda: self.connection.values(self.number, index, stop - start, self.dtype))

        read_chunks(out, self.box, chunking, values)

    def sources(self) -> Iterator[FileBlob]:
        return iter(())
