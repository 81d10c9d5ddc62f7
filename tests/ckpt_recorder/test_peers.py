"""What a run records is in the memory of its peers: checked, whole or not there, and never in the way of the run."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt.holding.holder import HeldPieces, Holder
from ckpt.holding.log_sender import LogSender
from ckpt.holding.peers import HELD
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NoSpaceError,
    UnsupportedError,
)
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.tensor import read
from ckpt_formats.stores import piece_requests, wire
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.peers_store import PeersStore, _newest_whole, open_peers
from ckpt_formats.stores.piece_requests import HeldFile, PieceName, SentPiece
from ckpt_formats.stores.wire import FrameKind
from ckpt_formats.universal.chain import chain_file, folder, states
from ckpt_formats.universal.chain.chain_file import ChainIndex
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.segment import rank_file
from ckpt_recorder import Bases, Peers, Recorder
from ckpt_recorder.orders import SegmentFollows, WriteRecord
from ckpt_recorder.writer import LogWriter, WriterSettings
from ckpt_training import load
from ckpt_training.writing.ring import Ring
from damage import ckpt
from shadow_peers import frame, log_in, until_end

HERE = NetworkAddress("127.0.0.1", 0)
TOKEN = b"a token that is long enough"
MEMORY = 1 << 26
STEPS = 12
SECONDS = 120.0


@dataclass
class Host:
    """A host of the run: what it holds, and where it listens."""

    pieces: HeldPieces
    holder: Holder

    @classmethod
    def start(cls, memory: int = MEMORY, address: NetworkAddress = HERE, token: bytes | None = None) -> "Host":
        pieces = HeldPieces(memory)
        return cls(pieces, Holder(pieces, address, token))

    @property
    def address(self) -> str:
        return str(self.holder.address)

    def connection(self, token: bytes | None = None) -> Connection:
        return Connection(self.holder.address, Credentials(token), "holder", 5.0)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run(chain: Path, peers: Peers, steps: int, during: Callable[[Recorder, int], None] | None = None) -> nn.Module:
    """A run of so many steps, whose model is returned."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 700), nn.Tanh(), nn.Linear(700, 129))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Recorder(model, optimizer, chain, peers=peers, prove=False, fingerprint=4) as recorder:
        for step in range(steps):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if during is not None:
                during(recorder, step + 1)
    return model


def url_of(hosts: list[Host], run: str = "run.chain") -> str:
    return f"peers://{','.join(host.address for host in hosts)}/{run}"


def state_at(path: Path, step: int) -> Checkpoint:
    return states.open_state(path, chain_file.load(path / chain_file.NAME), step)


def weights(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {f"{name} {state}": read(tensor).tobytes() for name, state, tensor in checkpoint.tensors()}


@dataclass
class Held:
    """A run that three hosts hold, the first of which recorded it."""

    hosts: list[Host]
    chain: Path
    model: nn.Module
    state: dict[str, bytes]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    hosts = [Host.start() for _ in range(3)]
    chain = tmp_path_factory.mktemp("peers") / "run.chain"
    model = run(chain, Peers([host.address for host in hosts]), STEPS)
    yield Held(hosts, chain, model, weights(state_at(chain, STEPS)))
    for host in hosts:
        host.holder.close()


@pytest.fixture
def flipped(recorded: Held) -> Iterator[Callable[[Host, int], str]]:
    """Flips a bit of a piece in a host's memory, until the test ends. Returns the file."""
    undo = []

    def flip(host: Host, number: int) -> str:
        (files,) = host.pieces._runs["run.chain"].values()
        name = next(name for name in files if name.endswith(".ckg"))
        piece = files[name].pieces[number]
        piece[len(piece) // 2] ^= 1
        undo.append((piece, len(piece) // 2))
        return name

    yield flip
    for piece, at in undo:
        piece[at] ^= 1


def test_two_other_hosts_hold_what_a_host_records(recorded: Held) -> None:
    assert [len(host.pieces.status) for host in recorded.hosts] == [0, 1, 1]
    assert {one.step for host in recorded.hosts for one in host.pieces.status} == {STEPS}


@pytest.mark.parametrize("left", [1, 2])
def test_any_host_that_is_left_has_the_last_step_without_the_chain(recorded: Held, left: int, tmp_path: Path) -> None:
    answer = ckpt("restore", url_of([recorded.hosts[left]]), tmp_path / "out", "--json", "--to", "universal")
    fields = json.loads(answer.out)
    assert fields["peers"]["damaged"] == []
    assert [one["source"] for one in fields["peers"]["sources"]] == [recorded.hosts[left].address]
    import ckpt as library

    assert weights(library.open(tmp_path / "out")) == recorded.state


def test_a_flipped_bit_in_memory_is_named_and_read_from_another_host(
    recorded: Held, flipped: Callable[[Host, int], str], tmp_path: Path
) -> None:
    name = flipped(recorded.hosts[1], 1)
    path = open_peers(url_of(recorded.hosts[1:]))
    assert weights(state_at(path, STEPS)) == recorded.state
    assert isinstance(path.store, PeersStore)
    assert [(one.holder, one.file) for one in path.store.damaged] == [(recorded.hosts[1].address, name)]
    notes = ckpt("restore", url_of(recorded.hosts[1:]), tmp_path / "out").err
    assert f"{recorded.hosts[1].address}: the piece of {name} at byte" in " ".join(notes.split())


def test_a_flipped_bit_whose_hash_was_changed_with_it_is_never_restored(recorded: Held) -> None:
    """A holder's list may be wrong, too: then the hashes that the log itself has tell."""
    (files,) = recorded.hosts[1].pieces._runs["run.chain"].values()
    file = next(file for name, file in files.items() if name.endswith(".ckg"))
    restored, numbers = [], range(0, len(file.pieces), 3)
    for number in numbers:
        before, piece = file.digests[number], file.pieces[number]
        piece[len(piece) // 2] ^= 1
        file.digests[number] = piece_requests.digest_of(piece)
        try:
            with suppress(CkptError):
                restored.append(weights(state_at(open_peers(url_of([recorded.hosts[1]])), STEPS)))
        finally:
            piece[len(piece) // 2] ^= 1
            file.digests[number] = before
    assert len(restored) < len(numbers) // 2
    assert all(one == recorded.state for one in restored)


def test_a_holder_that_dies_while_it_is_read_is_asked_no_more(recorded: Held) -> None:
    dead = Host.start()
    dead.holder.close()
    path = open_peers(url_of(recorded.hosts[1:]))
    assert isinstance(path.store, PeersStore)
    first, second = path.store._answers
    first = replace(first, address=dead.holder.address)
    store = PeersStore("run.chain", path.store._generation, (first, second), None, ())
    assert weights(state_at(StorePath(store, path.key), STEPS)) == recorded.state
    assert dict(store.silent) == {dead.address: "no holder can be reached: Connection refused"}
    assert store.nbytes_from.keys() == {str(second.address)}


def test_a_piece_that_is_damaged_everywhere_comes_from_the_chain_or_is_an_error(
    recorded: Held, flipped: Callable[[Host, int], str], tmp_path: Path
) -> None:
    name = flipped(recorded.hosts[1], 1)
    flipped(recorded.hosts[2], 1)
    url = url_of(recorded.hosts)
    with pytest.raises(IncompleteError, match=name):
        weights(state_at(open_peers(url), STEPS))
    assert ckpt("restore", url, tmp_path / "none").code == 20
    fields = json.loads(ckpt("restore", url, tmp_path / "out", "--from", recorded.chain, "--json").out)
    assert str(recorded.chain) in [one["source"] for one in fields["peers"]["sources"]]
    assert len(fields["peers"]["damaged"]) == 2


def test_a_host_that_comes_late_is_filled_and_the_run_does_not_wait_for_it(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        late = NetworkAddress("127.0.0.1", unused.getsockname()[1])
    first, hosts = Host.start(), list[Host]()
    states_of_late = []

    def during(recorder: Recorder, step: int) -> None:
        if step == 3:
            wait_until(lambda: bool(recorder.note() or recorder.peers.get(str(late))))
            states_of_late.append(recorder.peers[str(late)])
            hosts.append(Host.start(address=late))
            wait_until(lambda: bool(recorder.note() or recorder.peers[str(late)] == HELD))

    run(tmp_path / "run.chain", Peers([first.address, str(late)], "copies:1"), 5, during)
    assert "no holder can be reached" in states_of_late[0]
    path = open_peers(url_of(hosts))
    assert weights(state_at(path, 5)) == weights(state_at(tmp_path / "run.chain", 5))
    for host in (first, *hosts):
        host.holder.close()


@contextmanager
def writer_of(recorded: Held, segment: Path, peers: Peers, trainer: int) -> Iterator[LogWriter]:
    """A writer of rank 0 that has started a log with the layout of a recorded one."""
    segment.mkdir()
    (layout,) = recorded.chain.glob("*/layout.json")
    (segment / layout.name).write_bytes(layout.read_bytes())
    reading, status = os.pipe()
    settings = WriterSettings(str(segment), 0, "exact", 64, 1, 1, 1.0, asdict(peers))
    writer = LogWriter(settings, Ring(64, 1), status, trainer)
    threads = [] if writer._sender is None else [one.thread for one in writer._sender.links]
    yield writer
    for thread in threads:  # they write to the pipe
        thread.join(SECONDS)
    os.close(reading)
    os.close(status)


def test_a_run_that_goes_on_does_not_wait_until_the_writer_of_the_killed_one_reaches_its_holders(
    recorded: Held, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:  # nobody accepts
        peers = Peers([recorded.hosts[0].address, f"127.0.0.1:{hung.getsockname()[1]}"], "copies:1", run="other")
        with writer_of(recorded, tmp_path / "log", peers, trainer=0) as writer:
            assert folder.is_growing(tmp_path / "log")
            closing_thread = threading.Thread(target=writer.close)
            closing_thread.start()
            wait_until(lambda: not folder.is_growing(tmp_path / "log"))
            assert closing_thread.is_alive()
            hung.close()
            closing_thread.join(SECONDS)
            assert not closing_thread.is_alive()


def test_records_that_follow_each_other_at_once_share_a_piece(
    recorded: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece costs memory of the holder and of the sender."""
    monkeypatch.setattr("ckpt.holding.sent_file._SMALL_SECONDS", 2 * SECONDS)  # all records follow at once
    host = Host.start()
    peers = Peers([recorded.hosts[0].address, host.address], "copies:1", run="other")
    with writer_of(recorded, tmp_path / "log", peers, trainer=os.getppid()) as writer:

        def log() -> HeldFile | None:
            files = next(iter(host.pieces.run("other").values()), {})
            return next((file for name, file in files.items() if name.endswith(".ckg")), None)

        wait_until(lambda: log() is not None)  # the first piece waits for nothing
        for step in range(1, 9):
            writer.do(WriteRecord(int(Kind.SKIPPED), step, {}), b"")
        writer.close()
        nbytes = (tmp_path / "log" / rank_file(0)).stat().st_size
        wait_until(lambda: (own := log()) is not None and own.nbytes == nbytes)
        own = log()
        assert own is not None
        assert len(own.pieces) == 2
    host.holder.close()


def test_a_new_segment_does_not_wait_until_the_holders_have_the_one_before_it(
    recorded: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_recorder.writer._CLOSE_SECONDS", SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        peers = Peers([recorded.hosts[0].address, f"127.0.0.1:{hung.getsockname()[1]}"], "copies:1", run="other")
        with writer_of(recorded, tmp_path / "log", peers, trainer=os.getppid()) as writer:
            writer.do(SegmentFollows(), b"")
            begin = time.monotonic()
            writer.close()
            assert time.monotonic() - begin < SECONDS / 2
            hung.close()


def test_a_log_is_written_although_the_token_of_its_holders_cannot_be_read(
    recorded: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_TOKEN_FILE", str(tmp_path / "none"))
    peers = Peers([host.address for host in recorded.hosts])
    with writer_of(recorded, tmp_path / "log", peers, trainer=os.getppid()) as writer:
        assert writer._file is not None
        writer.close()


def test_a_holder_refuses_more_than_its_memory_and_the_run_goes_on(tmp_path: Path) -> None:
    first, small = Host.start(), Host.start(memory=1 << 18)  # the start alone has more
    seen = []

    def during(recorder: Recorder, step: int) -> None:
        if step == 2:
            # Before the state at the start is recorded, the holder has all that there is.
            wait_until(lambda: bool(recorder.note() or "may use 256" in recorder.peers.get(small.address, "")))
            seen.append(recorder.peers[small.address])

    run(tmp_path / "run.chain", Peers([first.address, small.address], "copies:1"), 3, during)
    assert "may use 256" in seen[0]
    assert small.pieces.nbytes <= 1 << 18
    assert weights(state_at(tmp_path / "run.chain", 3))
    with pytest.raises(IncompleteError, match="do not have all ranks"):
        open_peers(url_of([small]))
    for host in (first, small):
        host.holder.close()


def test_a_status_with_an_infinite_number_is_an_error_that_names_the_holder() -> None:
    class Infinite(HeldPieces):
        @property
        def nbytes(self) -> float:  # type: ignore[override]
            return float("inf")

        @nbytes.setter
        def nbytes(self, value: int) -> None: ...

    host = Holder(Infinite(MEMORY), HERE)
    with (
        closing(Connection(host.address, Credentials(), "holder", 5.0)) as connection,
        pytest.raises(CorruptError, match="a status that cannot be read"),
    ):
        piece_requests.holder_status(connection)
    host.close()


PIECE = SentPiece(PieceName("run", "g", "a/b.ckg", 0), piece_requests.digest_of(b"12345678"), 1, True, False, 1, 50)


def test_pieces_are_held_in_order_and_only_once() -> None:
    pieces = HeldPieces(1 << 20)
    assert pieces.store(PIECE, bytearray(b"12345678")) == 8
    assert pieces.store(PIECE, bytearray(b"12345678")) == 8  # sent again
    nbytes = pieces.nbytes
    with pytest.raises(CorruptError, match="another piece"):
        pieces.store(replace(PIECE, digest=piece_requests.digest_of(b"x")), bytearray(b"x"))
    with pytest.raises(IncompleteError, match="before"):
        pieces.store(replace(PIECE, name=replace(PIECE.name, offset=9)), bytearray(b"12345678"))
    with pytest.raises(NoSpaceError):
        pieces.store(replace(PIECE, name=replace(PIECE.name, offset=8)), bytearray(1 << 20))
    assert pieces.nbytes == nbytes
    assert bytes(pieces.fetch(PIECE.name)) == b"12345678"
    assert pieces.drop("run", before=50) == nbytes  # another run of this name, which began before
    assert pieces.drop("run", before=51) == 0


def test_a_segment_that_was_freed_is_not_filled_again_beside_the_newer_one() -> None:
    """The writer of a killed run, or another run of the same name, would otherwise send it once more."""
    pieces = HeldPieces(1 << 20)
    newer = replace(PIECE, name=replace(PIECE.name, generation="newer"), created=51)
    for piece in (PIECE, newer):
        pieces.store(piece, bytearray(b"12345678"))
    pieces.drop("run", before=newer.created)
    with pytest.raises(UnsupportedError, match="newer segment"):
        pieces.store(PIECE, bytearray(b"12345678"))
    assert list(pieces.run("run")) == ["newer"]


@pytest.mark.slow
def test_a_new_segment_has_room_beside_the_last_whole_one_after_writers_that_were_killed(
    recorded: Held, tmp_path: Path
) -> None:
    nbytes = 300_000
    host = Host.start(memory=5 * nbytes // 2)
    peers = Peers([recorded.hosts[0].address, host.address], "copies:1", run="restarted")
    (line,) = chain_file.load(recorded.chain / chain_file.NAME).segments
    layout = layouts.load(recorded.chain / line.folder / layouts.NAME)
    expected = [{"run-0"}, {"run-0", "run-1"}, {"run-0", "run-2"}, {"run-3"}]
    for number in range(4):  # the second one and the third are killed before their start is recorded
        segment = tmp_path / "run.chain" / f"gradients-{number:010}"
        segment.mkdir(parents=True)
        (segment / layouts.NAME).write_bytes(layouts.dump(replace(layout, run=f"run-{number}")))
        (segment / rank_file(0)).write_bytes(bytes([number]) * nbytes)
        own = replace(line, folder=segment.name, run=f"run-{number}", step=None)
        (tmp_path / "run.chain" / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex((), (own,))))
        is_killed = number in (1, 2)
        sender = LogSender(peers, segment, 0, lambda address, text: None)
        sender.advance(nbytes, Kind.NOTES if is_killed else Kind.FINGERPRINT, 0)
        wait_until(
            lambda sender=sender, is_whole=not is_killed: sender.is_whole == is_whole and sender.links[0].text == HELD
        )
        if number < 3:  # what the holder has may come a moment after the sender says so
            wait_until(lambda number=number: set(host.pieces.run("restarted")) == expected[number])
        sender.abandon()
    wait_until(lambda: set(host.pieces.run("restarted")) == expected[3])
    host.holder.close()


def test_the_segment_that_began_last_is_read_although_an_older_one_reaches_a_later_step(recorded: Held) -> None:
    """A holder that did not answer when the older one was freed still has it."""
    path = open_peers(url_of(recorded.hosts[1:]))
    assert isinstance(path.store, PeersStore)
    newest, (first, second) = path.store._generation, path.store._answers
    older = {name: replace(file, step=99, created=file.created - 1) for name, file in first.run[newest].items()}
    store = _newest_whole("run.chain", {newest, "older"}, [replace(first, run={"older": older}), second], None, "")
    assert (store._generation, store.step) == (newest, STEPS)
    assert "reaches step 99" in store.notices[0]


@pytest.mark.parametrize("name", ["../x", "/x", "x//y", "x/.hidden", "x" * 200, "a/" * 9 + "a", ""])
def test_a_name_that_leads_elsewhere_is_no_piece(name: str) -> None:
    with pytest.raises(CorruptError):
        PieceName("run", "g", name, 0)


EMPTY = replace(PIECE, digest=piece_requests.digest_of(b""))
HOSTILE = {
    "a size beyond the limit": frame(FrameKind.STORE, b"", nbytes=1 << 60),
    "a piece beyond the limit": frame(FrameKind.STORE, b"\0" * wire.MAX_REQUEST, nbytes=wire.MAX_STORE + 1),
    "a text beyond the body": frame(FrameKind.STORE, (1 << 30).to_bytes(4, "little") + b"{}"),
    "no text": frame(FrameKind.STORE, b"\0\0\0"),
    "a damaged piece": frame(FrameKind.STORE, piece_requests.dump_piece(PIECE, b"12345679")),
    "an empty piece": frame(FrameKind.STORE, piece_requests.dump_piece(EMPTY, b"")),
    "a deep text": frame(FrameKind.LIST, b"[" * 4000),
    "a list of no text": frame(FrameKind.DROP, b'{"run": 1, "before": "x"}'),
    "a fetch of nothing": frame(FrameKind.FETCH, b"{}"),
    "half a frame": frame(FrameKind.STORE, piece_requests.dump_piece(PIECE, b"12345678"))[:-3],
    "another protocol": b"GET / HTTP/1.1\r\n\r\n" + b" " * 64,
    "a frame of a shadow": frame(FrameKind.READ, b"\0" * 8),
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Host]:
    host = Host.start(token=TOKEN)
    yield host
    host.holder.close()


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_peer_changes_nothing(guarded: Host, content: bytes) -> None:
    with closing(guarded.connection(TOKEN)) as connection:
        with suppress(OSError):  # the holder may have left before it had all
            connection._socket.sendall(content)
            connection._socket.shutdown(socket.SHUT_WR)
        answer = until_end(connection._socket)
    assert bytes([FrameKind.STORED]) != answer[4:5]
    assert guarded.pieces.nbytes == 0
    with closing(guarded.connection(TOKEN)) as connection:
        assert piece_requests.holder_status(connection).nbytes == 0


@pytest.mark.parametrize("token", [None, b"another token that is long"])
def test_a_peer_without_the_token_is_refused(guarded: Host, token: bytes | None) -> None:
    with pytest.raises(UnsupportedError, match="token"), closing(guarded.connection(token)) as connection:
        piece_requests.list_run(connection, "run")


def test_a_login_that_is_sent_again_is_refused(guarded: Host) -> None:
    """A recorded login has the proof of another nonce."""
    with socket.create_connection((guarded.holder.address.host, guarded.holder.address.port)) as first:
        _, hello = wire.receive(first, wire.MAX_REQUEST, 5)
        nonce = bytes.fromhex(json.loads(hello)["nonce"])
        old = wire.proof(TOKEN, nonce, b"\x11" * wire.NONCE).hex()
    with socket.create_connection((guarded.holder.address.host, guarded.holder.address.port)) as second:
        log_in(second, old)
        assert wire.receive(second, wire.MAX_REQUEST, 5)[0] is FrameKind.ERROR


def test_the_hosts_of_a_circle_hold_for_those_before_them_at_a_distance() -> None:
    peers = Peers([f"h{number}:1" for number in range(6)], "copies:2", jump=2)
    assert peers.order == (0, 2, 4, 1, 3, 5)
    assert peers.holders_of(4) == (1, 3)
    holders = [one for host in range(6) for one in peers.holders_of(host)]
    assert sorted(holders) == sorted([*range(6)] * 2)
    assert [peers.host_of(rank, 12) for rank in (0, 1, 2, 11)] == [0, 0, 1, 5]
    with pytest.raises(InvalidArgumentError, match="8 ranks cannot be equally many on 6 hosts"):
        peers.host_of(0, 8)


@pytest.mark.parametrize(
    ("hosts", "fields"),
    [
        ("a:1", {}),
        (["a:1", "a:1", "b:1"], {}),
        (["a:1", "b:1"], {}),
        (["a:1", "b:1", "c:1"], {"scheme": "raid"}),
        (["a:1", "b:1", "c:1"], {"jump": 0}),
        (["a", "b:1", "c:1"], {}),
        (["a..b:1", "b:1", "c:1"], {}),
        (["a:1", "b:1", "c:1"], {"run": "my run"}),
    ],
)
def test_peers_that_cannot_be_are_refused(hosts: list[str], fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        Peers(hosts, **fields)  # type: ignore[arg-type]


def test_a_job_loads_the_last_segment_and_the_older_one_is_freed(tmp_path: Path) -> None:
    hosts = [Host.start() for _ in range(2)]
    torch.manual_seed(1)
    model, other = nn.Linear(64, 9), nn.Linear(64, 9)
    optimizer, others = (torch.optim.AdamW(one.parameters(), fused=True) for one in (model, other))
    peers = Peers([host.address for host in hosts], "copies:1")
    with Recorder(model, optimizer, tmp_path / "run.chain", peers=peers, prove=False, bases=Bases(every=4)) as recorder:
        for _ in range(6):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.note()
        wait_until(lambda: [one.generations for one in hosts[1].pieces.status] == [1])
    (tmp_path / "run.chain").rename(tmp_path / "lost")
    assert load(url_of(hosts), other, others).step == 6
    assert torch.equal(model.weight, other.weight)
    for host in hosts:
        host.holder.close()


def test_hold_frees_a_run_everywhere_and_says_which_holder_does_not_answer() -> None:
    hosts = [Host.start() for _ in range(2)]
    for number, host in enumerate(hosts):
        for run_name in ("ended", "other"):
            name = PieceName(run_name, "generation", "chain.json", 0)
            content = b"0" * (1000 + number)
            piece = SentPiece(name, piece_requests.digest_of(content), 1, False, True, 1, 1 << 40)
            with closing(host.connection()) as connection:
                piece_requests.store(connection, piece, content)
    done = ckpt("hold", "--free", url_of(hosts, "ended"), "--json")
    assert json.loads(done.out)["freed"] == {hosts[0].address: 1000, hosts[1].address: 1001}
    assert [[one.run for one in host.pieces.status] for host in hosts] == [["other"], ["other"]]
    again = ckpt("hold", "--free", url_of(hosts, "ended"))
    assert (again.code, "no holder has a run ended" in again.err) == (10, True)
    hosts[1].holder.close()
    partly = ckpt("hold", "--free", url_of(hosts, "other"))
    assert (partly.code, "1 holders do not answer" in partly.err) == (20, True)
    assert f"{hosts[1].address}: no holder can be reached" in partly.out + partly.err
    assert not hosts[0].pieces.status
    assert ckpt("hold", "--free", f"{hosts[0].address}/other").code == 2
    hosts[0].holder.close()
