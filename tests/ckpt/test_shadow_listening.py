"""Others read a shadow's state over a socket, checked; hostile peers get nothing, and change and crash nothing."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ckpt.pipeline import Execution
from ckpt.shadow import described, listener, server
from ckpt.shadow.client import ShadowConnection
from ckpt.shadow.server import Server
from ckpt.shadow.shadow import Shadow
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.tensor import ArrayBlob
from ckpt_formats.stores import connection as connection_module
from ckpt_formats.stores import wire
from ckpt_formats.stores.address import NetworkAddress, parse_address, tls_of
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.wire import FrameKind
from damage import ckpt
from gradient_logs import mutants, restored
from growing_log import bits, log_with_fingerprints
from shadow_peers import HOSTILE, log_in

TOKEN = b"a token that is long enough"
HERE = NetworkAddress("127.0.0.1", 0)


@dataclass
class Listening:
    """A shadow that listens, and the chain that it follows."""

    run: Path
    shadow: Shadow
    server: Server

    @property
    def address(self) -> NetworkAddress:
        return self.server.address

    def go_to(self, step: int) -> None:
        while self.shadow.step != step:
            self.shadow.poll(upto=step)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    run = tmp_path / "run.chain"
    log_with_fingerprints(12, 3).write(run)
    shadow = Shadow(run, resources=Execution(workers=1))
    one = Listening(run, shadow, Server(shadow, HERE))
    one.go_to(7)
    yield one
    one.server.close()


def test_commands_read_it_like_any_checkpoint(listening: Listening, tmp_path: Path) -> None:
    address = f"tcp://{listening.address}"
    done = ckpt("restore", address, tmp_path / "out")
    assert done.code == 0, done
    assert ckpt("diff", tmp_path / "out", f"{listening.run}@7").code == 0
    assert ckpt("restore", address, tmp_path / "out.pt", "--to", "torch").code == 0
    assert ckpt("diff", tmp_path / "out.pt", f"{listening.run}@7", "--tensors-only").code == 0
    shown = json.loads(ckpt("inspect", address, "--json").out)
    assert (shown["format"], shown["origin"]["step"]) == ("shadow", 7)
    assert "shadow" in ckpt("inspect", address).out
    assert ckpt("restore", address, tmp_path / "other", "--step", 8).code == 10
    listening.go_to(12)


def test_the_checkpoint_is_the_one_in_memory(listening: Listening) -> None:
    with ShadowConnection(listening.address) as connection, listening.shadow.frozen() as checkpoint:
        other = connection.checkpoint
        assert bits(other) == bits(checkpoint) == bits(restored(listening.run, 7))
        assert described.dump(other) == described.dump(checkpoint)


def test_tensors_of_many_chunks_and_any_block_of_them_are_read(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "CHUNK_NBYTES", 12)  # three elements
    with ShadowConnection(listening.address) as connection:
        v, wanted = connection.checkpoint["v"], restored(listening.run, 7)["v"]
        assert np.array_equal(v[1, :, 1], wanted[1, :, 1])
        assert np.array_equal(v[...], wanted[...])


def test_the_state_is_frozen_while_somebody_reads_and_no_longer(listening: Listening) -> None:
    connection = ShadowConnection(listening.address)
    thread = threading.Thread(target=listening.go_to, args=(12,))
    thread.start()
    time.sleep(0.2)
    assert listening.shadow.step == 7
    assert bits(connection.checkpoint) == bits(restored(listening.run, 7))
    connection.close()
    thread.join(120)
    assert listening.shadow.step == 12
    with pytest.raises(IncompleteError):
        bits(connection.checkpoint)


def test_a_reader_without_requests_is_sent_away(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    with ShadowConnection(listening.address):
        listening.go_to(12)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_peers_get_nothing_and_change_nothing(
    name: str, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LOGIN_SECONDS", 0.3)
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(server, "WAIT_SECONDS", 0.5)
    problems: list[object] = []
    monkeypatch.setattr(threading, "excepthook", problems.append)
    with socket.create_connection((listening.address.host, listening.address.port), 5) as peer:
        HOSTILE[name](peer)
    with ShadowConnection(listening.address) as connection:
        assert bits(connection.checkpoint) == bits(restored(listening.run, 7))
    listening.go_to(12)
    assert problems == []


def test_listen_sends_too_many_peers_away(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LOGIN_SECONDS", 1.0)
    where = (listening.address.host, listening.address.port)
    peers = [socket.create_connection(where, 5) for _ in range(listener.MAX_PEERS)]
    time.sleep(0.1)
    with socket.create_connection(where, 5) as another:
        assert another.recv(1) == b""
    for peer in peers:
        peer.close()
    for _ in range(100):
        with suppress(CkptError):
            ShadowConnection(listening.address).close()
            return
        time.sleep(0.05)
    raise AssertionError("nobody is let in again")


def test_listen_demands_the_token(listening: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_token = Server(listening.shadow, HERE, TOKEN)
    with ShadowConnection(with_token.address, Credentials(TOKEN)) as connection:
        assert connection.checkpoint.step == 7
    for token, message in ((None, "demands a token"), (TOKEN + b"!", "is not the shadow's")):
        with pytest.raises(UnsupportedError, match=message):
            ShadowConnection(with_token.address, Credentials(token))
    address = f"tcp://{with_token.address}"
    assert ckpt("inspect", address).code == 22
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    monkeypatch.setenv("CKPT_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "token").chmod(0o600)
    mine = ckpt("inspect", address)
    assert mine.code == 0
    assert "can read the token" not in mine.err
    (tmp_path / "token").chmod(0o644)
    shared = ckpt("inspect", address)
    assert shared.code == 0
    assert "other users can read the token" in shared.err
    assert "(mode 0644)" in shared.err
    assert TOKEN.decode() not in shared.err + shared.out
    monkeypatch.delenv("CKPT_TOKEN_FILE")
    monkeypatch.setenv("CKPT_TOKEN", TOKEN.decode())
    assert ckpt("inspect", address).code == 0
    with pytest.raises(InvalidArgumentError, match="must have 16"):
        Server(listening.shadow, HERE, b"short")
    with_token.close()


def test_other_machines_need_a_token_and_tls(listening: Listening, certificate: tuple[Path, Path]) -> None:
    tls = tls_of(*certificate)
    everywhere = NetworkAddress("0.0.0.0", 0)
    for token, context in ((None, None), (TOKEN, None), (None, tls)):
        with pytest.raises(InvalidArgumentError, match="needs a token and TLS"):
            Server(listening.shadow, everywhere, token, context)
    Server(listening.shadow, everywhere, TOKEN, tls).close()
    assert ckpt("shadow", listening.run, "--listen", "0.0.0.0:0").code == 2


def test_tls_is_spoken_with_whom_the_certificate_is_trusted(
    listening: Listening, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tls = Server(listening.shadow, HERE, TOKEN, tls_of(*certificate))
    trusted = Credentials(TOKEN, certificate[0])
    with ShadowConnection(with_tls.address, trusted) as connection:
        assert bits(connection.checkpoint) == bits(restored(listening.run, 7))
    monkeypatch.setattr(NetworkAddress, "is_loopback", False)
    with pytest.raises(UnsafeError, match="not trusted"):
        ShadowConnection(with_tls.address, Credentials(TOKEN))
    with pytest.raises((UnsafeError, NotFoundError)):
        ShadowConnection(listening.address, trusted)  # which speaks no TLS
    with_tls.close()


def test_listen_parses_addresses(tmp_path: Path) -> None:
    for text, host, port in (("7077", "localhost", 7077), ("[::1]:80", "::1", 80), ("tcp://a.b:1/", "a.b", 1)):
        assert parse_address(text) == NetworkAddress(host, port)
    for text in ("", "tcp://", "host:", "host:70000", ":80", "host:x", "host:-1"):
        with pytest.raises(InvalidArgumentError):
            parse_address(text)
    assert ckpt("inspect", "tcp://localhost:1").code == 10
    assert [NetworkAddress(host, 1).is_loopback for host in ("::1", "127.9.9.9", "localhost", "10.0.0.1", "x")] == [
        *(True, True, True),
        *(False, False),
    ]


def hostile_shadow(answer: Callable[[socket.socket], None]) -> Iterator[NetworkAddress]:
    """The address of a listener that answers one reader in its own way."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            peer, _ = listening.accept()
            with peer:
                answer(peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield NetworkAddress("127.0.0.1", listening.getsockname()[1])
        thread.join(120)


def _hello(peer: socket.socket) -> None:
    hello = {"protocol": 1, "nonce": "00" * 32, "token": False, "serves": "state"}
    wire.send(peer, FrameKind.HELLO, json.dumps(hello).encode(), 5)
    wire.receive(peer, wire.MAX_REQUEST, 5)


def _send_and(kind: FrameKind, body: bytes) -> Callable[[socket.socket], None]:
    def answer(peer: socket.socket) -> None:
        _hello(peer)
        wire.send(peer, kind, body, 5)

    return answer


def _then(content: bytes) -> Callable[[socket.socket], None]:
    def answer(peer: socket.socket) -> None:
        _hello(peer)
        peer.sendall(content)

    return answer


ANSWERS: dict[str, Callable[[socket.socket], None]] = {
    "nothing": lambda peer: None,
    "no frame": lambda peer: peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64)),
    "no JSON": lambda peer: wire.send(peer, FrameKind.HELLO, b"\xff", 5),
    "another protocol": lambda peer: wire.send(
        peer, FrameKind.HELLO, json.dumps({"protocol": 9, "nonce": "", "token": False}).encode(), 5
    ),
    "too long": _then(wire.HEAD.pack(wire.MAGIC, FrameKind.STATE, 1 << 60, 0)),
    "a wrong hash": _then(wire.HEAD.pack(wire.MAGIC, FrameKind.STATE, 1, 0) + b"x"),
    "no state": _send_and(FrameKind.STATE, b"[]"),
    "deep": _send_and(FrameKind.STATE, b"[" * 100_000),
    "an error without sense": _send_and(FrameKind.ERROR, b"{}"),
    "another frame": _send_and(FrameKind.VALUES, b"12345678"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_hostile_shadow_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "SECONDS", 5.0)
    for address in hostile_shadow(ANSWERS[name]):
        with pytest.raises((CorruptError, IncompleteError, UnsupportedError)):
            ShadowConnection(address)


def test_values_that_were_damaged_on_the_way_are_refused(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    send = wire.send

    def send_damaged(peer: socket.socket, kind: FrameKind, body: bytes, seconds: float) -> None:
        if kind is not FrameKind.VALUES:
            return send(peer, kind, body, seconds)
        import xxhash

        head = wire.HEAD.pack(wire.MAGIC, kind, len(body), xxhash.xxh3_64_intdigest(body))
        peer.sendall(head + bytes([body[0] ^ 1]) + bytes(body[1:]))
        return None

    monkeypatch.setattr(wire, "send", send_damaged)
    with ShadowConnection(listening.address) as connection, pytest.raises(CorruptError, match="does not have its hash"):
        connection.checkpoint["w"][...]


def test_any_description_loads_or_is_refused(listening: Listening) -> None:
    with listening.shadow.frozen() as checkpoint:
        fields = json.loads(described.dump(checkpoint))
    fields["parameters"] = fields["parameters"][:1]
    fields["errors"] = [["w", "param", {"codec": "int8"}]]
    fields["notices"] = [["a notice", ["w"], 1]]
    fields["original"] = ["torch", "a.pt"]
    part = {"number": 1, "count": 2, "run": "run", "segment": "gradients-0000000000", "total": 3, "places": [0]}
    fields["part"] = part
    count = 0
    for _, mutant in mutants(fields):
        content = json.dumps(mutant).encode()
        try:
            described.load(content, Path("tcp:/x"), lambda number, shape, dtype: ArrayBlob(np.zeros(1)), ())
        except CkptError:
            count += 1
    assert count > 1000


def test_a_login_is_needed_before_anything_is_sent(listening: Listening) -> None:
    """Nothing but the greeting comes before the proof, and the greeting has nothing of the state."""
    with_token = Server(listening.shadow, HERE, TOKEN)
    with socket.create_connection((with_token.address.host, with_token.address.port), 5) as peer:
        _, hello = wire.receive(peer, wire.MAX_REQUEST, 5)
        assert json.loads(hello).keys() == {"protocol", "nonce", "token"}
        log_in(peer, hello=bytes(hello))
        kind, body = wire.receive(peer, wire.MAX_STATE, 5)
        assert kind is FrameKind.ERROR
        assert b"w" not in json.loads(body)["kind"].encode()
        assert peer.recv(1) == b""
    with_token.close()
