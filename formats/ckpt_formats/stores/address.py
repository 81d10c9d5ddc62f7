"""Where servers of ckpt listen, and whom they let in."""

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from ckpt_formats.stores.http_client import is_loopback

MIN_TOKEN = 16
"""The minimum length of a token in bytes."""


@dataclass(frozen=True)
class NetworkAddress:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Is it only reached from the same machine?"""
        return is_loopback(self.host)


def parse_address(text: str) -> NetworkAddress:
    """The address in `HOST:PORT`, `PORT` (of localhost) or `tcp://HOST:PORT`. Raises `InvalidArgumentError`."""
    host, colon, port = text.removeprefix("tcp://").rstrip("/").rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else "localhost"
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16 and _is_host(host)):
        raise InvalidArgumentError(f"{text!r:.80} is not an address", hint="Write HOST:PORT, such as localhost:7077.")
    return NetworkAddress(host, int(port))


def _is_host(text: str) -> bool:
    """Whether the name server can be asked for a name."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return 0 < len(text) < 256


def listening_socket(
    address: NetworkAddress, token: bytes | None, tls: ssl.SSLContext | None
) -> tuple[socket.socket, NetworkAddress]:
    """A socket that listens, and where. `token`: what readers must know; `tls`: the certificate and key.

    Raises `InvalidArgumentError` for an address of other machines without a token and TLS, and for a token that is too
    short to be secret; `UnsupportedError` if the address cannot be used.
    """
    if not address.is_loopback and (token is None or tls is None):
        raise InvalidArgumentError(
            f"listening on {address}, where other machines are, needs a token and TLS",
            hint="Give both, or listen on localhost.",
        )
    if token is not None and len(token) < MIN_TOKEN:
        raise InvalidArgumentError(f"the token has {len(token)} bytes; it must have {MIN_TOKEN} or more")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listening = socket.create_server((address.host, address.port), family=family, backlog=128)
    except OSError as error:
        raise UnsupportedError(f"cannot listen on {address}: {error.strerror or error}") from None
    return listening, NetworkAddress(address.host, listening.getsockname()[1])


def tls_of(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS with a certificate and its private key: files in PEM.

    Raises `NotFoundError` if there is no such file, `UnsupportedError` if they cannot be used.
    """
    for file in (certificate, key):
        if not file.exists():
            raise NotFoundError("there is nothing at this path", where=file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"the certificate and its key cannot be used: {error}", where=certificate) from None
    return context
