"""Peers that mean no good to a shadow that listens. Each gets a connected socket, and returns when it has no more."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable

from ckpt.shadow import wire
from ckpt.shadow.wire import FrameKind

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


# Those of a server of a log


def ask(content: object) -> bytes:
    """The bytes of a request."""
    return frame(FrameKind.REQUEST, json.dumps(content).encode())


def asks(content: object, raw: bytes | None = None) -> Peer:
    """Logs in, sends a request, and must get an error, or nothing."""

    def act(peer: socket.socket) -> None:
        log_in(peer)
        peer.sendall(ask(content) if raw is None else raw)
        answer = until_end(peer)
        assert not answer or answer[4] == FrameKind.ERROR, f"it got {FrameKind(answer[4]).name}"

    return act


def _takes_nothing(peer: socket.socket) -> None:
    """Asks for the log again and again, and never reads it."""
    log_in(peer)
    peer.settimeout(0.5)
    try:
        for _ in range(2000):
            peer.sendall(ask({"request": "log", "folder": SEGMENT, "rank": 0, "range": [0, 1 << 20]}))
    except OSError:
        pass


def _asks_and_leaves(peer: socket.socket) -> None:
    log_in(peer)
    peer.sendall(ask({"request": "log", "folder": SEGMENT, "rank": 0, "range": [0, 1 << 20]}))
    peer.recv(10)


SEGMENT = "gradients-0000000000"
_LOG = {"request": "log", "folder": SEGMENT, "rank": 0, "range": [0, 10]}
_FILE = {"request": "file", "folder": SEGMENT, "file": "layout.json", "range": [0, 10]}
_GROWN = {"request": "grown", "folder": SEGMENT, "list": "", "nbytes": [0, 0], "seconds": 0}
_HOSTILE_VALUES: tuple[object, ...] = (
    *(None, True, -1, 1.5, 1 << 70, "", "x", "..", "../..", "/etc", "a/../../b", "\0", [], [1], {}, {"a": 1}),
    *([-1, 1], [0, -1], [0, 1 << 62], [1 << 62, 1], [0.5, 1], ["0", 1], [0, 1, 2], [None, None], [True, True]),
)
LOG_HOSTILE: dict[str, Peer] = {
    name: HOSTILE[name]
    for name in (
        *("silent", "leaves at once", "another protocol", "half a head", "too long", "longer than it says"),
        *("a wrong hash", "an unknown kind", "no JSON", "deep JSON", "numbers", "a list", "no texts", "no nonce"),
        *("reads before its login", "another kind of login"),
    )
}
LOG_HOSTILE |= {
    "a deep request": asks(None, frame(FrameKind.REQUEST, b"[" * 60_000)),
    "a long request": asks(None, frame(FrameKind.REQUEST, b" " * (1 << 17))),
    "no request": asks(None, frame(FrameKind.REQUEST, b"\xff")),
    "another frame": asks(None, frame(FrameKind.READ, json.dumps(_LOG).encode())),
    "a number": asks(5),
    "a list of requests": asks([_LOG]),
    "nothing asked": asks({}),
    "an unknown request": asks({"request": "write", "folder": SEGMENT}),
    "another folder": asks({**_LOG, "folder": "chain.lock"}),
    "no such file": asks({**_FILE, "file": "rank-00009.ckg"}),
    "the list as a file": asks({**_FILE, "file": "../chain.json"}),
    "an absolute file": asks({**_FILE, "file": "/etc/passwd"}),
    "a link": asks({**_FILE, "file": "link"}),
    "a link as a log": asks({**_LOG, "rank": 7}),
    "too much": asks({**_LOG, "range": [0, 1 << 40]}),
    "waits too long": asks({**_GROWN, "seconds": 1e9}),
    "too many ranks": asks({**_GROWN, "nbytes": [0] * 5000}),
    "takes nothing": _takes_nothing,
    "asks and leaves": _asks_and_leaves,
}
LOG_HOSTILE |= {
    f"{request['request']}: {key} = {value!r:.20}": asks({**request, key: value})
    for request in (_LOG, _FILE, _GROWN)
    for key in request
    if key != "request"
    for value in _HOSTILE_VALUES
    if not (key == "list" and isinstance(value, str))
    and not (key == "seconds" and value == 1.5)
    and not (key == "nbytes" and isinstance(value, list) and all(type(one) is int and one >= 0 for one in value))
}


def log_noise(seed: int) -> Peer:
    """A peer that sends a valid login or request of a log, with some of its bytes changed."""
    draw = random.Random(seed)
    content = bytearray(draw.choice([_login({"nonce": "11" * 32, "proof": ""}), *map(ask, (_LOG, _FILE, _GROWN))]))
    for _ in range(draw.randrange(1, 6)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    stop = draw.randrange(1, len(content) + 1)
    logs_in = draw.random() < 0.7

    def act(peer: socket.socket) -> None:
        if logs_in:
            log_in(peer)
        peer.sendall(bytes(content[:stop]))

    return act
