"""What listeners and their readers send each other: frames with a length and a hash, after the proof of a token.

    reader                       listener
                                 HELLO   JSON: protocol, nonce, whether a token is demanded, what is served
    LOGIN  JSON: nonce, proof
    ---- a shadow, which serves a state
                                 STATE   JSON: the checkpoint without values; from now on the state is frozen
    READ   tensor, chunk
                                 VALUES  the values of the chunk, little-endian, C order
    ADVANCE  a step              STATE   the same at that later step (for parts of a state, which must agree on one)
    ---- `ckpt serve`, which serves the files of a log
    REQUEST  JSON (`log_server`)
                                 ANSWER  JSON, or bytes of a file
                                 LOG     bytes of a log, without a hash: its records have their own

Instead of an answer, the listener may send ERROR, and then it ends the connection. A state is frozen until the
connection ends. A frame is a head of 24 bytes and a body: `CKSH`, the kind, zeros, the length of the body, and the
XXH3-64 of the body.
"""

import hashlib
import hmac
import socket
import time
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import BinaryIO

import xxhash

from ckpt.serving.address import NetworkAddress, parse_address
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsupportedError,
)

PROTOCOL = 1
HEAD = Struct("<4sB3xQQ")
MAGIC = b"CKSH"
READ = Struct("<II")
ADVANCE = Struct("<Q")
CHUNK_NBYTES = 1 << 20
"""The maximum size of the values in a frame in bytes."""
MAX_REQUEST = 1 << 12
"""The maximum size of a frame of a reader in bytes."""
MAX_STATE = 1 << 28
"""The maximum size of the text of a checkpoint in bytes."""
_SLOWEST = 1 << 14
"""Bytes of a log a second that the other side must send, after its time to answer."""
NONCE = 32
"""Bytes of a nonce."""


class FrameKind(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    LOGIN = 2
    STATE = 3
    READ = 4
    VALUES = 5
    ERROR = 6
    ADVANCE = 7
    REQUEST = 8
    ANSWER = 9
    LOG = 10


KINDS = frozenset(FrameKind)


class PeerGone(IncompleteError):
    """The other side ended the connection, or was too slow."""


def parse_addresses(text: str) -> tuple[NetworkAddress, ...]:
    """The addresses in `tcp://HOST:PORT`, or in several of these with commas between. Raises `InvalidArgumentError`."""
    return tuple(parse_address(one.strip()) for one in text.split(","))


def proof(token: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """The proof that a reader knows the token: HMAC-SHA-256 of both nonces."""
    return hmac.new(token, b"ckpt-shadow-1" + server_nonce + client_nonce, hashlib.sha256).digest()


def send(peer: socket.socket, kind: FrameKind, body: bytes | memoryview, seconds: float) -> None:
    """Send a frame within so many seconds. Raises `PeerGone`."""
    head = HEAD.pack(MAGIC, kind, len(body), xxhash.xxh3_64_intdigest(body))
    try:
        peer.settimeout(seconds)
        peer.sendall(head)
        peer.sendall(body)
    except OSError as error:
        raise PeerGone(f"the connection ended: {error}") from None


def receive(peer: socket.socket, max_nbytes: int, seconds: float) -> tuple[FrameKind, bytearray]:
    """The kind and the body of the next frame, complete within so many seconds.

    Raises `PeerGone`, and `CorruptError` if it is no frame, is longer than `max_nbytes` or does not have its hash.
    """
    deadline = time.monotonic() + seconds
    kind, nbytes, digest = _receive_head(peer, max_nbytes, deadline)
    body = _receive(peer, nbytes, deadline)
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise CorruptError("a frame does not have its hash: it was damaged on the way")
    return kind, body


def send_file(peer: socket.socket, file: BinaryIO, offset: int, nbytes: int, seconds: float) -> None:
    """Send a LOG frame with a range of a file: the system copies it (`sendfile`), but with TLS, which must encrypt it.

    Raises `PeerGone`, also if the file ends before: the reader cannot know where the next frame begins.
    """
    try:
        peer.settimeout(seconds)
        peer.sendall(HEAD.pack(MAGIC, FrameKind.LOG, nbytes, 0))
        sent = peer.sendfile(file, offset, nbytes) if nbytes else 0
    except OSError as error:
        raise PeerGone(f"the connection ended: {error}") from None
    if sent != nbytes:
        raise PeerGone("the file became shorter")


def receive_log(
    peer: socket.socket, max_nbytes: int, write: Callable[[memoryview], None], seconds: float
) -> tuple[FrameKind, bytearray]:
    """Pass the bytes of a LOG frame on as they arrive. Returns its kind; of another frame the kind and the body.

    `max_nbytes`: of a LOG frame; `seconds`: the longest time without any byte. Raises as `receive`.
    """
    deadline = time.monotonic() + seconds
    kind, nbytes, digest = _receive_head(peer, max(max_nbytes, MAX_REQUEST), deadline)
    if nbytes > (max_nbytes if kind is FrameKind.LOG else MAX_REQUEST):
        raise CorruptError(f"a frame of {nbytes} bytes, more than was requested")
    if kind is not FrameKind.LOG:
        body = _receive(peer, nbytes, deadline)
        if xxhash.xxh3_64_intdigest(body) != digest:
            raise CorruptError("a frame does not have its hash: it was damaged on the way")
        return kind, body
    buffer = memoryview(bytearray(min(nbytes, CHUNK_NBYTES)))
    remaining = nbytes
    deadline += nbytes / _SLOWEST
    try:
        peer.settimeout(seconds)
        while remaining:
            if time.monotonic() > deadline:
                raise PeerGone("the other side is too slow")
            received = peer.recv_into(buffer, min(remaining, len(buffer)))
            if not received:
                raise PeerGone("the other side ended the connection")
            write(buffer[:received])
            remaining -= received
    except OSError as error:
        raise PeerGone(f"the connection ended: {error}") from None
    return kind, bytearray()


def _receive_head(peer: socket.socket, max_nbytes: int, deadline: float) -> tuple[FrameKind, int, int]:
    """The kind of a frame, the length of its body, and its hash."""
    magic, kind, nbytes, digest = HEAD.unpack(_receive(peer, HEAD.size, deadline))
    if magic != MAGIC or kind not in KINDS:
        raise CorruptError("not a frame of a shadow's protocol")
    if nbytes > max_nbytes:
        raise CorruptError(f"a frame of {nbytes} bytes, more than {max_nbytes}")
    return FrameKind(kind), nbytes, digest


def _receive(peer: socket.socket, nbytes: int, deadline: float) -> bytearray:
    """So many bytes. Memory is taken as they arrive, because a hostile peer may only announce them."""
    content = bytearray()
    try:
        while len(content) < nbytes:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise PeerGone("the other side is too slow")
            peer.settimeout(remaining)
            part = peer.recv(min(nbytes - len(content), 1 << 20))
            if not part:
                raise PeerGone("the other side ended the connection")
            content += part
    except OSError as error:
        raise PeerGone(f"the connection ended: {error}") from None
    return content


ERRORS: dict[str, type[CkptError]] = {
    "corrupt": CorruptError,
    "incomplete": IncompleteError,
    "not found": NotFoundError,
    "unsupported": UnsupportedError,
}
"""The errors that a shadow names to its readers."""


def error_name(error: CkptError) -> str:
    """The name of an error's kind in a frame."""
    return next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "incomplete")
