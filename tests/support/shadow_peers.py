"""Peers that mean no good to a shadow that listens. Each gets a connected socket, and returns when it has no more."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable

from ckpt_formats.stores import wire
from ckpt_formats.stores.wire import FrameKind

Peer = Callable[[socket.socket], None]


def log_in(peer: socket.socket, proof: str = "", nonce: str = "11" * wire.NONCE, hello: bytes | None = None) -> None:
    """Read the greeting, and send a login."""
    if hello is None:
        wire.receive(peer, wire.MAX_REQUEST, 5)
    wire.send(peer, FrameKind.LOGIN, json.dumps({"nonce": nonce, "proof": proof}).encode(), 5)


def until_end(peer: socket.socket) -> bytes:
    """All that the shadow still sends; it ends the connection."""
    content = b""
    peer.settimeout(20)
    try:
        while part := peer.recv(1 << 16):
            content += part
    except ConnectionError:
        pass
    return content


def sends(content: bytes, logs_in: bool = False) -> Peer:
    """Sends some bytes, before or after a login, and waits for the end."""

    def act(peer: socket.socket) -> None:
        if logs_in:
            log_in(peer)
            assert wire.receive(peer, wire.MAX_STATE, 5)[0] is FrameKind.STATE
        peer.sendall(content)
        answer = until_end(peer)
        assert bytes([FrameKind.VALUES]) != answer[4:5], "it got values"

    return act


def frame(kind: int, body: bytes, nbytes: int | None = None, digest: int | None = None) -> bytes:
    """The bytes of a frame; its length and hash may be others."""
    import xxhash

    digest = xxhash.xxh3_64_intdigest(body) if digest is None else digest
    return wire.HEAD.pack(wire.MAGIC, kind, len(body) if nbytes is None else nbytes, digest) + body


def _login(content: object) -> bytes:
    return frame(FrameKind.LOGIN, json.dumps(content).encode())


def _reads_without_end(peer: socket.socket) -> None:
    """Asks for values, and never reads the answers."""
    log_in(peer)
    peer.settimeout(0.5)
    try:
        for _ in range(2000):
            peer.sendall(frame(FrameKind.READ, wire.READ.pack(0, 0)))
    except OSError:
        pass


def _leaves_half_way(peer: socket.socket) -> None:
    log_in(peer)
    peer.recv(40)


HOSTILE: dict[str, Peer] = {
    "silent": sends(b""),
    "leaves at once": lambda peer: None,
    "another protocol": sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64)),
    "half a head": sends(b"CKSH\x02"),
    "too long": sends(wire.HEAD.pack(wire.MAGIC, FrameKind.LOGIN, 1 << 62, 0)),
    "longer than it says": sends(frame(FrameKind.LOGIN, b"{}", nbytes=4000)),
    "a wrong hash": sends(frame(FrameKind.LOGIN, b"{}", digest=1)),
    "an unknown kind": sends(frame(77, b"{}")),
    "no JSON": sends(frame(FrameKind.LOGIN, b"\xff\xfe")),
    "deep JSON": sends(frame(FrameKind.LOGIN, b"[" * 4000)),
    "numbers": sends(_login(5)),
    "a list": sends(_login(["nonce"])),
    "no texts": sends(_login({"nonce": 1, "proof": []})),
    "no nonce": sends(_login({"nonce": "", "proof": ""})),
    "reads before its login": sends(frame(FrameKind.READ, wire.READ.pack(0, 0))),
    "another kind of login": sends(frame(FrameKind.HELLO, json.dumps({"nonce": "11" * 32, "proof": ""}).encode())),
    "no such tensor": sends(frame(FrameKind.READ, wire.READ.pack(1 << 31, 0)), logs_in=True),
    "no such chunk": sends(frame(FrameKind.READ, wire.READ.pack(0, (1 << 32) - 1)), logs_in=True),
    "a long request": sends(frame(FrameKind.READ, bytes(9)), logs_in=True),
    "a short request": sends(frame(FrameKind.READ, bytes(3)), logs_in=True),
    "another request": sends(frame(FrameKind.LOGIN, bytes(8)), logs_in=True),
    "a step that was": sends(frame(FrameKind.ADVANCE, wire.ADVANCE.pack(0)), logs_in=True),
    "a step that never comes": sends(frame(FrameKind.ADVANCE, wire.ADVANCE.pack((1 << 64) - 1)), logs_in=True),
    "half a step": sends(frame(FrameKind.ADVANCE, bytes(4)), logs_in=True),
    "noise after the login": sends(bytes(range(256)) * 8, logs_in=True),
    "idle after the login": sends(b"", logs_in=True),
    "reads without end": _reads_without_end,
    "leaves half way": _leaves_half_way,
}


def noise(seed: int) -> Peer:
    """A peer that sends a valid login, or a frame, with some of its bytes changed."""
    draw = random.Random(seed)
    content = bytearray(
        draw.choice([_login({"nonce": "11" * 32, "proof": ""}), frame(FrameKind.READ, wire.READ.pack(0, 0)), bytes(64)])
    )
    for _ in range(draw.randrange(1, 6)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    stop = draw.randrange(1, len(content) + 1)
    logs_in = draw.random() < 0.5

    def act(peer: socket.socket) -> None:
        if logs_in:
            log_in(peer)
            wire.receive(peer, wire.MAX_STATE, 20)
        peer.sendall(bytes(content[:stop]))

    return act
