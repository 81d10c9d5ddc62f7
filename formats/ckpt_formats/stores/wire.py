"""What shadows, holders and their peers send each other: frames with a length and a hash, after the proof of a token.

    reader                       shadow
                                 HELLO   JSON: protocol, nonce, whether a token is demanded
    LOGIN  JSON: nonce, proof
                                 STATE   JSON: the checkpoint without values; from now on the state is frozen
    READ   tensor, chunk
                                 VALUES  the values of the chunk, little-endian, C order
    ADVANCE  a step              STATE   the same at that later step (for parts of a state, which must agree on one)

    sender, or reader            holder of pieces (`ckpt hold`), after the login
    STORE  a piece               STORED  JSON: the bytes of the file that are held now
    LIST   JSON: the run         HELD    JSON: the pieces that are held, or without a run the status
    FETCH  JSON: a piece         VALUES  its bytes
    DROP   JSON: a run, a time   STORED  JSON: the bytes that are held now
    ADD    a piece and a place   STORED  JSON: the bytes that are held now; `parity_requests` has what parity is
    PARITIES  JSON: the run      HELD    JSON: the parities that are held
    SUM    JSON: a parity        VALUES  where its columns end, and its bytes

Instead of an answer, the listener may send ERROR, and then it ends the connection. A state is frozen until the
connection ends. A frame is a head of 24 bytes and a body: `CKSH`, the kind, zeros, the length of the body, and the
XXH3-64 of the body.
"""

import hashlib
import hmac
import socket
import time
from enum import IntEnum
from struct import Struct

import xxhash

from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NoSpaceError,
    NotFoundError,
    UnsupportedError,
)
from ckpt_formats.stores.address import NetworkAddress, parse_address

PROTOCOL = 1
HEAD = Struct("<4sB3xQQ")
MAGIC = b"CKSH"
READ = Struct("<II")
ADVANCE = Struct("<Q")
CHUNK_NBYTES = 1 << 20
"""The maximum size of the values in a frame in bytes."""
MAX_REQUEST = 1 << 12
"""The maximum size of a frame of a reader in bytes."""
MAX_STORE = CHUNK_NBYTES + MAX_REQUEST
"""The maximum size of a frame with a piece in bytes: its bytes after the text that says what it is."""
MAX_STATE = 1 << 28
"""The maximum size of the text of a checkpoint in bytes."""
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
    STORE = 8
    STORED = 9
    LIST = 10
    HELD = 11
    FETCH = 12
    DROP = 13
    ADD = 14
    PARITIES = 15
    SUM = 16


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


def _receive_head(peer: socket.socket, max_nbytes: int, deadline: float) -> tuple[FrameKind, int, int]:
    """The kind of a frame, the length of its body, and its hash."""
    magic, kind, nbytes, digest = HEAD.unpack(_receive(peer, HEAD.size, deadline))
    if magic != MAGIC or kind not in KINDS:
        raise CorruptError("not a frame of this protocol")
    if nbytes > max_nbytes:
        raise CorruptError(f"a frame of {nbytes} bytes, more than {max_nbytes}")
    return FrameKind(kind), nbytes, digest


def _receive(peer: socket.socket, nbytes: int, deadline: float) -> bytearray:
    """So many bytes. Memory is taken as they arrive, because a hostile peer may only announce them."""
    content = bytearray()
    while len(content) < nbytes:
        begin = len(content)
        part = bytearray(min(nbytes - begin, MAX_STORE))  # `recv_into` it: a `recv` takes and cuts memory each time
        with memoryview(part) as view:
            _fill(peer, view, deadline)
        if begin:
            content += part
        else:
            content = part
    return content


def _fill(peer: socket.socket, view: memoryview, deadline: float) -> None:
    """Receive as many bytes as the memory has."""
    done = 0
    try:
        while done < len(view):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise PeerGone("the other side is too slow")
            peer.settimeout(remaining)
            count = peer.recv_into(view[done:])
            if not count:
                raise PeerGone("the other side ended the connection")
            done += count
    except OSError as error:
        raise PeerGone(f"the connection ended: {error}") from None


ERRORS: dict[str, type[CkptError]] = {
    "corrupt": CorruptError,
    "incomplete": IncompleteError,
    "no space": NoSpaceError,
    "not found": NotFoundError,
    "unsupported": UnsupportedError,
}
"""The errors that a listener names to its peers."""


def error_name(error: CkptError) -> str:
    """The name of an error's kind in a frame."""
    return next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "incomplete")
