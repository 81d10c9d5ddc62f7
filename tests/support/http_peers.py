"""What hostile peers send to a server of the chain `run.chain`."""

import random
import socket
from contextlib import suppress

from shadow_peers import Peer

SEGMENT = "gradients-0000000000"
HTTP_HOSTILE: dict[str, bytes] = {
    "silent": b"",
    "half a line": b"GET /run.chain/chain.json HT",
    "half a head": b"GET /run.chain/chain.json HTTP/1.1\r\nHost: x\r\n",
    "a long line": b"GET /" + b"x" * (1 << 17) + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    "noise": bytes(range(256)) * 64,
    "another method": b"POST /run.chain/chain.json HTTP/1.1\r\nContent-Length: 1000000\r\n\r\nx",
    "a body": b"GET /run.chain/chain.json HTTP/1.1\r\nContent-Length: 5\r\n\r\nGET /",
    "a body in chunks": b"GET /run.chain/chain.json HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an old protocol": b"GET /run.chain/nothing\r\n",
    "another version": b"GET /run.chain/chain.json HTTP/9.9\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "a huge range": b"GET /run.chain/chain.json HTTP/1.1\r\nRange: bytes=%s-\r\n\r\n" % (b"9" * 5000),
    "a range of text": "GET /run.chain/chain.json HTTP/1.1\r\nRange: bytes=٣-٤\r\n\r\n".encode(),
    "waits for ever": b"GET /run.chain/?list HTTP/1.1\r\nPrefer: wait=1e99, wait=9999999\r\nIf-None-Match: *\r\n\r\n",
}


def http_peer(content: bytes) -> Peer:
    """A peer that sends these bytes, and takes all that is answered."""

    def act(peer: socket.socket) -> None:
        with suppress(OSError):
            peer.sendall(content)
            while peer.recv(1 << 16):
                pass

    return act


def http_noise(seed: int) -> Peer:
    """A peer that sends a valid request with some of its bytes changed, or only a part of it."""
    draw = random.Random(seed)
    name = draw.choice(["chain.json", "?list", f"{SEGMENT}/layout.json"])
    lines = [
        f"GET /run.chain/{name} HTTP/1.1",
        *draw.sample(["Range: bytes=0-9", 'If-None-Match: "x"', "Prefer: wait=0.1", "Host: x", "Connection: close"], 3),
        *("", ""),
    ]
    content = bytearray("\r\n".join(lines).encode())
    for _ in range(draw.randrange(6)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return http_peer(bytes(content[: draw.randrange(1, len(content) + 1)]))
