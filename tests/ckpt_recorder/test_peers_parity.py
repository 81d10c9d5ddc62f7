"""Hosts hold parity of each other's logs: any that the scheme allows may be lost, and nothing else is ever given."""

import itertools
import json
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckpt.holding import holder
from ckpt.holding.holder import DamagedPart, HeldPieces, Holder
from ckpt.holding.log_sender import LogSender
from ckpt.holding.peers import HELD, Peers
from ckpt_codecs.base import Array
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NoSpaceError,
    UnsupportedError,
)
from ckpt_formats.core.tensor import read
from ckpt_formats.parity.code import multiply, parity_matrix, solution
from ckpt_formats.parity.scheme import PeerScheme
from ckpt_formats.stores import parity_requests, piece_requests, wire
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.parity_pieces import ParityRow, PiecesInParity, computed
from ckpt_formats.stores.parity_requests import ColumnPiece, HeldColumn, HeldParity, ParityName, ParityPlace
from ckpt_formats.stores.peers_store import PeersStore, open_peers
from ckpt_formats.stores.piece_requests import PieceName, SentPiece
from ckpt_formats.stores.wire import FrameKind, PeerGone
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.segment import open_segment, rank_file
from ckpt_recorder import Bases, Recorder
from ckpt_training import load
from damage import ckpt
from peers_parity import RANKS, SAMPLES, STEPS, Logs, are_filled
from peers_parity import rounds as kills
from run import run
from shadow_peers import frame, until_end

HERE = NetworkAddress("127.0.0.1", 0)
MEMORY = 1 << 27
SECONDS = 300.0


@dataclass
class Host:
    """A host: what it holds, and where it listens."""

    pieces: HeldPieces
    holder: Holder

    @classmethod
    def start(cls, kind: type[Holder] = Holder, address: NetworkAddress = HERE, memory: int = MEMORY) -> "Host":
        pieces = HeldPieces(memory)
        return cls(pieces, kind(pieces, address))

    @property
    def address(self) -> str:
        return str(self.holder.address)


@dataclass
class Filled:
    """Hosts that hold all of some logs, and who sent them."""

    hosts: list[Host]
    senders: list[LogSender]
    peers: Peers

    def url(self, without: Sequence[int] = ()) -> str:
        left = [host.address for number, host in enumerate(self.hosts) if number not in without]
        return f"peers://{','.join(left)}/run.chain"

    def close(self) -> None:
        for sender in self.senders:
            sender.close(0.0)
        for host in self.hosts:
            host.holder.close()


def has_all(sender: LogSender) -> bool:
    """Whether all holders have what there is of a log."""
    main = sender.queue.main
    log = sender.queue.files[main]
    return all(
        link.text == HELD
        and log.cut == log.nbytes
        and (not link.part.holds_all or link.counts.get(main, (0, 0))[0] == len(log.pieces))
        and all(link.added[stream] == len(stream.contributions) for stream, _ in link.part.rows)
        and len(link.marked) == len(link.part.rows)
        for link in sender.links
    )


def wait_for(senders: Sequence[LogSender]) -> None:
    deadline = time.monotonic() + SECONDS
    while not all(map(has_all, senders)):
        assert time.monotonic() < deadline, [link.text for one in senders for link in one.links]
        time.sleep(0.02)


def fill(logs: Logs, scheme: str, count: int, jump: int = 1, steps: int = STEPS, kind: type[Holder] = Holder) -> Filled:
    hosts = [Host.start(kind) for _ in range(count)]
    peers = Peers([host.address for host in hosts], scheme, jump, run="run.chain")
    senders = [LogSender(peers, logs.segment, rank, lambda address, text: None) for rank in range(RANKS)]
    for step in range(steps + 1):
        for rank, sender in enumerate(senders):
            logs.advance(sender, rank, step)
    wait_for(senders)
    return Filled(hosts, senders, peers)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    return Logs.create(tmp_path_factory.mktemp("logs"), 1)


@pytest.fixture(scope="module")
def six(logs: Logs) -> Iterator[Filled]:
    filled = fill(logs, "parity:4+2", 6)
    yield filled
    filled.close()


def weights(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {f"{name} {state}": read(tensor).tobytes() for name, state, tensor in checkpoint.tensors()}


def store_of(path: Path) -> PeersStore:
    store = path.store  # type: ignore[attr-defined]
    assert isinstance(store, PeersStore)
    return store


@pytest.mark.slow
def test_any_two_of_six_hosts_may_be_lost_and_three_are_named_or_nothing(logs: Logs, six: Filled) -> None:
    for count in range(4):
        for lost in itertools.combinations(range(6), count):
            if count == 3:
                with suppress(IncompleteError):
                    logs.compare(open_peers(six.url(lost)))
                continue
            path = open_peers(six.url(lost))
            assert logs.compare(path) == STEPS, lost
            sizes = sum(logs.ends[rank][-1] for rank in lost)
            assert store_of(path).nbytes_computed == sizes, lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "count", "jump"), [("parity:2+1", 3, 1), ("parity:2+1", 7, 2), ("parity:2+2", 5, 1)]
)
def test_hosts_with_several_ranks_with_none_and_in_groups_may_be_lost(
    logs: Logs, scheme: str, count: int, jump: int
) -> None:
    if count == 5:
        with pytest.raises(InvalidArgumentError, match="6 ranks cannot be equally many on 5 hosts"):
            Peers([f"h{n}:1" for n in range(5)], scheme).host_of(0, RANKS)
        return
    filled = fill(logs, scheme, count, jump)
    spares = filled.peers.parsed.spares
    for lost in itertools.product(*filled.peers.parsed.groups(count, jump)):
        assert logs.compare(open_peers(filled.url(lost[: spares * len(lost)]))) == STEPS, lost
    filled.close()


@pytest.mark.slow
def test_a_group_holds_its_own_and_two_fourths_of_it_as_parity(logs: Logs, six: Filled) -> None:
    own = sum(ends[-1] for ends in logs.ends)
    statuses = [status for host in six.hosts for status in host.pieces.status]
    sums = [
        buffer for host in six.hosts for one in host.pieces._parities["run.chain"].values() for buffer in one.values()
    ]
    # Each of the 12 parities is as long as the longest of 4 columns, and takes whole MiB.
    longest = sum(max(column.end for column in buffer._columns.values()) for buffer in sums)
    assert own * 2 / 4 < longest < own * 2 / 4 * 1.4
    assert sum(one.parity_nbytes for one in statuses) <= longest + len(sums) * (1 << 20)
    assert sum(one.nbytes for one in statuses) < own * 1.01


def flips(host: Host) -> Iterator[tuple[str, "bytearray | Array", int]]:
    """Where a bit may be flipped in the memory of a host: of each file and parity one place."""
    for files in host.pieces._runs["run.chain"].values():
        for name, file in files.items():
            if name.endswith(".ckg"):
                yield name, file.pieces[1], len(file.pieces[1]) // 2
    for buffers in host.pieces._parities["run.chain"].values():
        for key, buffer in buffers.items():
            yield f"parity {key}", buffer._blocks[0], 1000


@pytest.mark.slow
def test_a_flipped_bit_in_memory_is_named_and_what_it_was_in_is_computed_without_it(logs: Logs, six: Filled) -> None:
    named = set()
    for number, host in enumerate(six.hosts):
        lost = (number + 2) % 6  # a column of the set whose first parity the host has
        for _, part, at in flips(host):
            part[at] ^= 1
            path = open_peers(six.url([lost]))
            assert logs.compare(path) == STEPS
            part[at] ^= 1
            damaged = store_of(path).damaged
            assert {one.holder for one in damaged} <= {host.address}
            named |= {(one.holder, one.is_parity) for one in damaged}
    assert named == {(host.address, is_parity) for host in six.hosts for is_parity in (False, True)}


@pytest.mark.slow
def test_pieces_that_parity_cannot_give_come_from_the_chain_or_are_an_error(logs: Logs, six: Filled) -> None:
    for _, part, at in (places := [place for host in six.hosts[2:] for place in flips(host) if "parity" in place[0]]):
        part[at] ^= 1
    try:
        with pytest.raises(IncompleteError, match="as they were sent"):
            logs.compare(open_peers(six.url([0, 1])))
        path = open_peers(six.url([0, 1]), logs.chain)
        assert logs.compare(path) == STEPS
        assert store_of(path).nbytes_from[str(logs.chain)]
        assert all(one.is_parity for one in store_of(path).damaged)
    finally:
        for _, part, at in places:
            part[at] ^= 1


@pytest.mark.slow
def test_a_parity_that_changes_at_each_request_is_left_out_and_not_named_as_damaged(
    logs: Logs, six: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = six.hosts[2].holder  # of the first row of a set with host 0
    answer = holder._answer_to

    def shorter(kind: FrameKind, body: bytearray) -> tuple[FrameKind, bytes | memoryview]:
        answered, content = answer(kind, body)
        if kind is FrameKind.SUM:
            content = (int.from_bytes(content[:8], "little") - 1).to_bytes(8, "little") + content[8:]
        return answered, content

    monkeypatch.setattr("ckpt_formats.stores.peers_store._REFRESHES", 1)
    monkeypatch.setattr(holder, "_answer_to", shorter)
    path = open_peers(six.url([0]))
    assert logs.compare(path) == STEPS
    assert store_of(path).damaged == set()


def test_a_sum_is_what_was_listed_unless_a_column_grew_there_or_is_shorter() -> None:
    pieces = [ColumnPiece("a/b.ckg", 0, nbytes, "00" * 16, 1, True, 0) for nbytes in (100, 50)]
    columns = {number: HeldColumn(number, 2, 1, True, (piece,)) for number, piece in enumerate(pieces)}
    row = ParityRow.of(HERE, HeldParity(NAME, columns))
    for ends, start, stop, expected in (
        ([100, 50], 0, 100, True),
        ([100, 60], 0, 50, True),
        ([100, 60], 0, 51, False),
        ([100, 60], 60, 100, True),
        ([40, 50], 0, 30, False),
    ):
        assert row.knows(ends, start, stop) == expected


class Mortal(Holder):
    """Can die: then it answers nobody any more, on no connection."""

    is_dead = False

    def _answer_to(self, kind: FrameKind, body: bytearray) -> "tuple[FrameKind, bytes | memoryview]":
        if self.is_dead:
            raise PeerGone("dead")
        return super()._answer_to(kind, body)


class Breaking(Holder):
    """Ends some connections after it has done what was asked, before it says so."""

    count = 0

    def _answer_to(self, kind: FrameKind, body: bytearray) -> "tuple[FrameKind, bytes | memoryview]":
        answer = super()._answer_to(kind, body)
        type(self).count += kind in (FrameKind.ADD, FrameKind.STORE)
        if kind in (FrameKind.ADD, FrameKind.STORE) and self.count % 7 == 0:
            raise PeerGone("broken on purpose")
        return answer


@pytest.mark.slow
def test_a_piece_that_is_sent_again_after_a_broken_connection_is_added_once(logs: Logs) -> None:
    filled = fill(logs, "parity:4+2", 6, kind=Breaking)
    assert Breaking.count > 14
    for lost in ([0, 1], [2, 5]):
        assert logs.compare(open_peers(filled.url(lost))) == STEPS
    filled.close()


@pytest.mark.slow
def test_pieces_added_while_a_lost_one_is_read_do_not_change_it(logs: Logs) -> None:
    filled = fill(logs, "parity:4+2", 6, steps=1)
    path = open_peers(filled.url([1, 4]))
    for rank, sender in enumerate(filled.senders):
        if rank not in (1, 4):
            logs.advance(sender, rank, 4)
    wait_for([one for rank, one in enumerate(filled.senders) if rank not in (1, 4)])
    assert logs.compare(path) == 1
    assert store_of(path).nbytes_computed
    filled.close()


@pytest.mark.slow
def test_a_holder_that_was_started_again_is_filled_again(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.holding.holder_link._CHECK_SECONDS", 0.3)
    filled = fill(logs, "parity:2+1", 6, jump=2, steps=2, kind=Mortal)
    old = filled.hosts[3].holder
    assert isinstance(old, Mortal)
    old.is_dead = True
    old.close()
    filled.hosts[3] = Host.start(address=old.address)
    for rank, sender in enumerate(filled.senders):
        logs.advance(sender, rank, STEPS)
    deadline = time.monotonic() + SECONDS
    while not are_filled(logs, filled.peers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # Both other hosts of its group are needed, or it and one of them.
    for lost in ([1, 0], [3, 2], [5, 4]):
        assert logs.compare(open_peers(filled.url(lost))) == STEPS
    filled.close()


@pytest.mark.slow
def test_ranks_send_parts_of_a_base_that_a_log_begins_with_and_a_part_that_is_lost_is_computed(tmp_path: Path) -> None:
    chain = tmp_path / "run.chain"
    shutil.copytree(SAMPLES / "recorded-1" / "run.chain", chain)
    segment = chain / "gradients-0000000003"
    hosts = [Host.start() for _ in range(4)]
    peers = Peers([host.address for host in hosts], "parity:2+2")
    senders = [LogSender(peers, segment, rank, lambda address, text: None) for rank in range(2)]
    for rank, log in enumerate(open_segment(segment).logs):
        for record in log.records:
            senders[rank].advance(log.end, record.kind, record.step)
    wait_for(senders)
    filled = Filled(hosts, senders, peers)
    files = [{name for one in host.pieces._runs["run.chain"].values() for name in one} for host in (hosts[0], hosts[2])]
    of_base = [{name for name in own if name.startswith("step-0000000003/")} for own in files]
    assert all(of_base)
    assert not of_base[0] & of_base[1]
    index = chain_file.load(chain / chain_file.NAME)
    expected = weights(states.open_state(chain, index, states.last_step(chain, index)))
    for lost in itertools.combinations(range(4), 2):
        path = open_peers(filled.url(lost))
        index = chain_file.load(path / chain_file.NAME)
        assert weights(states.open_state(path, index, states.last_step(path, index))) == expected, lost
    url = filled.url([0, 1])
    answer = json.loads(ckpt("restore", url, tmp_path / "out", "--json").out)["peers"]
    assert answer["computed_nbytes"] > 50_000  # the log of rank 0, and its part of the base
    assert answer["damaged"] == []
    assert "from parity" in ckpt("restore", url, tmp_path / "again").err
    assert "up to step 6, 0 B in 0 files, 2.0 MiB of parity" in ckpt("hold", "--status", hosts[3].address).err
    with hosts[0].pieces._lock:  # a file of the base that nobody has
        for buffers in hosts[0].pieces._parities.values():
            buffers.clear()
        (own,) = hosts[2].pieces._runs["run.chain"].values()
        del own[min(of_base[1])]
    with pytest.raises(IncompleteError, match="do not have all ranks"):
        open_peers(filled.url([1, 3]))
    filled.close()


@pytest.mark.slow
def test_a_parity_that_is_filled_again_without_a_removed_base_gets_the_log_and_is_not_taken_for_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.holding.holder_link._CHECK_SECONDS", 0.3)
    chain = tmp_path / "run.chain"
    shutil.copytree(SAMPLES / "recorded-1" / "run.chain", chain)
    segment = chain / "gradients-0000000003"
    hosts = [Host.start(Mortal) for _ in range(4)]
    peers = Peers([host.address for host in hosts], "parity:2+2")
    senders = [LogSender(peers, segment, rank, lambda address, text: None) for rank in range(2)]
    ends = [log.end for log in open_segment(segment).logs]
    for rank, end in enumerate(ends):
        senders[rank].advance(end // 2, Kind.FINGERPRINT, 3)
    wait_for(senders)
    deadline = time.monotonic() + SECONDS
    while not senders[0].is_whole:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    shutil.rmtree(chain / "step-0000000003")
    for number in (0, 1):  # the own holder of rank 0, and one of parities of both ranks
        old = hosts[number].holder
        assert isinstance(old, Mortal)
        old.is_dead = True
        old.close()
        hosts[number] = Host.start(address=old.address)
    for rank, end in enumerate(ends):
        senders[rank].advance(end, Kind.GRADIENTS, 6)
    url = Filled(hosts, senders, peers).url()
    lacking = "lacks a base that was removed from the chain before it was sent"
    links = [link for one in senders for link in one.links]
    while (
        {link.text for link in links} != {HELD, lacking}
        or {str(link.address) for link in links if link.text == lacking} != {host.address for host in hosts[:2]}
        or open_peers(url).store.step < 6
    ):
        assert time.monotonic() < deadline, [link.text for link in links]
        time.sleep(0.05)
    assert senders[0].links[0].text == lacking
    assert senders[0].watch is not None
    senders[0].watch.look()
    assert not senders[0].is_whole
    store = store_of(open_peers(url))  # what is held no longer is in the parities that were not started again
    for rank, end in enumerate(ends):
        name = rank_file(rank)
        log = store.get(f"run.chain/{segment.name}/{name}", 0, end)
        assert bytes(log) == (segment / name).read_bytes()[:end]
    for path in (SAMPLES / "recorded-1" / "run.chain" / "step-0000000003").rglob("*.*"):
        name = path.relative_to(SAMPLES / "recorded-1")
        assert bytes(store.get(str(name), 0, path.stat().st_size)) == path.read_bytes()
    Filled(hosts, senders, peers).close()


def test_a_base_that_comes_after_records_of_steps_is_part_of_what_a_replay_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.holding.sent_file._SMALL_SECONDS", 0.0)
    chain = tmp_path / "run.chain"
    shutil.copytree(SAMPLES / "recorded-1" / "run.chain", chain)
    listed = (chain / chain_file.NAME).rename(tmp_path / "listed")
    segment = chain / "gradients-0000000003"
    peers = Peers([f"127.0.0.1:{port}" for port in (1, 2, 3)], "parity:2+1")  # nobody is there
    sender = LogSender(peers, segment, 0, lambda address, text: None)
    for end, kind in ((10_000, Kind.FINGERPRINT), (20_000, Kind.GRADIENTS), (30_000, Kind.GRADIENTS)):
        sender.advance(end, kind, 3)
        assert sender.queue.cut_next(list(sender.queue.files.items()))
    listed.rename(chain / chain_file.NAME)
    sender._look_at_chain()
    while sender.queue.cut_next(list(sender.queue.files.items())):
        pass
    starts = sender.queue.starts(sender.queue.files)
    assert starts is not None
    for stream in sender.queue.streams:
        names = [one.name for one in stream.contributions]
        assert [name for name in names[starts[stream] :] if name != sender.queue.main] == []
        assert len(names) > 1
    sender.close(0.0)


NAME = ParityName("run", "g", 0, 1, 0, 1, 2, 2)
PLACE = ParityPlace(NAME, 0, 7, 0, 0)
CONTENT = bytearray(b"12345678")
PIECE = SentPiece(PieceName("run", "g", "a/b.ckg", 0), piece_requests.digest_of(CONTENT), 1, True, False, 1, 50)


def test_a_holder_adds_each_piece_once_and_refuses_others_in_its_place() -> None:
    pieces = HeldPieces(1 << 22)
    pieces.add(PLACE, PIECE, CONTENT)
    nbytes = pieces.add(PLACE, PIECE, CONTENT)  # sent again
    other = bytearray(b"1234567x")
    changed = replace(PIECE, digest=piece_requests.digest_of(other))
    for place, piece, content, message in (
        (PLACE, changed, other, "another piece"),
        (replace(PLACE, at=4), PIECE, CONTENT, "another piece"),
        (replace(PLACE, rank=8, at=8), PIECE, CONTENT, "rank 7's, not rank 8's"),
        (replace(PLACE, parity=replace(NAME, data=3)), PIECE, CONTENT, "another scheme"),
    ):
        with pytest.raises(CorruptError, match=message):
            pieces.add(place, piece, content)
    with pytest.raises(NoSpaceError):
        pieces.add(replace(PLACE, at=10 << 20, after=8), PIECE, bytearray(4 << 20))
    for content in (CONTENT, bytearray()):  # the piece before it, or a mark's, was freed
        with pytest.raises(IncompleteError, match="piece before it"):
            pieces.add(replace(PLACE, at=16, after=16), PIECE, content)
    assert pieces.nbytes == nbytes
    factor = parity_matrix(2, 2)[1, :1][None]
    expected = multiply(factor, np.frombuffer(CONTENT, np.uint8)[None])[0].tobytes()
    assert pieces.sum(NAME, 0, 9) == ([8, 0], expected + b"\0")
    assert pieces.drop("run", before=50) == nbytes
    assert pieces.drop("run", before=51) == 0
    pieces.add(PLACE, replace(PIECE, created=60), CONTENT)
    pieces.drop("run", before=60)
    with pytest.raises(UnsupportedError, match="newer segment"):
        pieces.add(PLACE, PIECE, CONTENT)


def test_scrubbing_names_a_flipped_bit_of_a_piece_and_of_a_parity_also_after_more_was_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, pieces, at = np.random.default_rng(3), HeldPieces(1 << 24), 0
    for number, nbytes in enumerate([1, 8191, 70_000, (1 << 20) - 5, 8192, 300_000]):  # across rows and blocks
        content = bytearray(draw.bytes(nbytes))
        sent = replace(PIECE, name=replace(PIECE.name, offset=at), digest=piece_requests.digest_of(content))
        pieces.store(sent, content)
        for column in (0, 1):
            pieces.add(replace(PLACE, column=column, rank=7 + column, at=at, after=at), sent, content)
        at += nbytes
        assert not any(pieces.scrub()), number
    (buffer,) = pieces._parities["run"]["g"].values()
    (file,) = pieces._runs["run"]["g"].values()
    for block, place in ((0, 0), (0, 8191), (1, 100_000), (1, (1 << 20) - 1)):
        buffer._blocks[block][place] ^= 1
        content = bytearray(draw.bytes(9000))
        sent = replace(PIECE, name=replace(PIECE.name, offset=at), digest=piece_requests.digest_of(content))
        pieces.add(replace(PLACE, at=at, after=at), sent, content)
        assert [one for one in pieces.scrub() if one] == [DamagedPart("run", "g", NAME.text, block << 20)]
        buffer._blocks[block][place] ^= 1
        at += 9000
    file.pieces[2][5] ^= 1
    monkeypatch.setattr(holder, "SCRUB_PAUSE", 0.0)
    monkeypatch.setattr(holder, "SCRUB_SECONDS", 0.0)
    stop, reported = threading.Event(), list[DamagedPart]()

    def report(part: DamagedPart) -> None:
        reported.append(part)
        if part.what == NAME.text:
            stop.set()
        else:
            buffer._blocks[0][1] ^= 1

    holder.scrub_until(stop, pieces, report)
    assert reported == [DamagedPart("run", "g", "a/b.ckg", 8192), DamagedPart("run", "g", NAME.text, 0)]


def test_scrubbing_takes_no_memory_of_what_is_freed_and_small_pieces_together() -> None:
    pieces, count = HeldPieces(1 << 24), 100
    for number in range(count):
        content = bytearray([number])
        sent = replace(PIECE, name=replace(PIECE.name, offset=number), digest=piece_requests.digest_of(content))
        pieces.store(sent, content)
    pieces.add(PLACE, PIECE, CONTENT)
    assert list(pieces.scrub()) == [None]  # of the parity
    pieces.add(replace(PLACE, at=1 << 20, after=8), PIECE, CONTENT)
    (buffer,) = map(weakref.ref, pieces._parities["run"]["g"].values())
    scrubbed = pieces.scrub()
    assert next(scrubbed) is None
    pieces.drop("run", before=51)
    assert buffer() is None
    assert list(scrubbed) == [None]


HOSTILE = {
    "a column beyond the set": {"column": 2},
    "a rank that is no number": {"rank": "0"},
    "a place below 0": {"at": -1},
    "a place beyond any": {"at": 1 << 60},
    "no place of the piece before": {"after": None},
    "a row beyond the spares": {"row": 2},
    "a set of one": {"data": 1},
    "more blocks than a code has": {"data": 250, "spares": 6},
    "a truth for a number": {"lane": True},
    "a name that leads elsewhere": {"file": "../x"},
    "another hash": {"digest": "00" * 16},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_piece_of_a_parity_changes_nothing(fields: dict[str, object]) -> None:
    valid = parity_requests.dump_added(PLACE, PIECE, bytes(CONTENT))
    end = 4 + int.from_bytes(valid[:4], "little")
    body = piece_requests.dump_fields({**json.loads(valid[4:end]), **fields}, bytes(CONTENT))
    with pytest.raises(CorruptError):
        parity_requests.parse_added(bytearray(body))
    assert parity_requests.parse_added(bytearray(valid)) == (PLACE, PIECE, CONTENT)


@pytest.fixture(scope="module")
def one() -> Iterator[Host]:
    host = Host.start()
    yield host
    host.holder.close()


@pytest.mark.parametrize(
    "body", [b"{}", b'{"run": 1}', b"[" * 4000, b'{"run":"run","pieces":1,"offset":-1,"nbytes":1}']
)
@pytest.mark.parametrize("kind", [FrameKind.ADD, FrameKind.PARITIES, FrameKind.SUM])
def test_a_hostile_request_for_parity_is_refused(one: Host, kind: FrameKind, body: bytes) -> None:
    with closing(Connection(one.holder.address, Credentials(), "holder", 5.0)) as connection:
        connection._socket.sendall(frame(kind, body))
        answer = until_end(connection._socket)
    assert answer[4] == FrameKind.ERROR
    assert one.pieces.nbytes == 0


@pytest.mark.parametrize(
    ("scheme", "count", "jump", "message"),
    [
        ("parity:4+2", 5, 1, "needs 6 hosts, and there are 5"),
        ("parity:2+1", 5, 2, "needs 6 hosts, and there are 5"),
        ("parity:1+1", 5, 1, "is not copies:N"),
        ("parity:8", 20, 1, "is not copies:N"),
    ],
)
def test_peers_refuse_parity_for_which_there_are_too_few_hosts(
    scheme: str, count: int, jump: int, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Peers([f"h{number}:1" for number in range(count)], scheme, jump)


def test_peers_refuse_more_connections_than_a_holder_lets_in() -> None:
    peers = Peers([f"h{number}:1" for number in range(34)], "parity:32+2")
    assert peers.host_of(271, 272) == 33
    with pytest.raises(InvalidArgumentError, match="connections to each holder"):
        peers.host_of(0, 34 * 14)


@pytest.mark.parametrize("scheme", ["parity:2+1", "parity:4+2", "parity:3+3"])
@pytest.mark.parametrize(("count", "jump"), [(6, 1), (13, 2), (20, 3)])
def test_each_host_is_in_as_many_sets_as_columns_and_holds_as_many_parities_as_rows(
    scheme: str, count: int, jump: int
) -> None:
    peers = Peers([f"h{number}:1" for number in range(count)], scheme, 1 if count == 6 else jump)
    sets = peers.sets
    for host in range(count):
        assert len(peers.sets_of(host)) == peers.parsed.data
        assert sum(host in one.parities for one in sets) == peers.parsed.spares
        assert host not in peers.parities_of(host)
        for one in peers.sets_of(host):
            assert set(one.parities) <= set(peers.parities_of(host))
    assert all(len({*one.data, *one.parities}) == peers.parsed.hosts for one in sets)


def test_factors_are_those_whose_sum_has_one_column_and_none_if_there_are_none() -> None:
    """Against all combinations of rows, over the factors that a mask of listed pieces leaves."""
    draw, every = np.random.default_rng(1), np.arange(256, dtype=np.uint8)
    products = np.concatenate([multiply(half[:, None], every[None]) for half in (every[:128], every[128:])])
    counts = Counter[bool]()
    for _ in range(60):
        rows, columns = draw.integers(1, 3), draw.integers(1, 4)
        mask = draw.integers(0, 2, (rows, columns)).astype(np.uint8)
        matrix = np.ascontiguousarray(parity_matrix(5, 3)[:rows, :columns] * mask)
        sums = products[:, matrix[0]]  # of each factor of the first row, then of each of both
        if rows == 2:
            sums = sums[:, None] ^ products[:, matrix[1]]
        for column in range(columns):
            factors, unit = solution(matrix, column), np.eye(columns, dtype=np.uint8)[column]
            if factors is not None:
                assert (multiply(factors[None], matrix)[0] == unit).all()
            assert (factors is not None) == bool((sums == unit).all(-1).any())
            counts[factors is None] += 1
    assert min(counts.values()) > 20


@pytest.mark.parametrize("damaged", [0, 2])
def test_rows_give_any_columns_that_are_lost_and_do_without_a_damaged_row(damaged: int) -> None:
    """Four of eight columns, from any rows of eight: more choices of four rows than are tried."""
    scheme, draw = PeerScheme(8, 8), np.random.default_rng(2)
    streams = draw.integers(0, 256, (8, 500), np.uint8)
    own = [
        ColumnPiece(f"s/rank-{n}.ckg", 0, 500, piece_requests.digest_of(streams[n].data), 1, True, 0) for n in range(8)
    ]
    columns = {number: HeldColumn(number, 8, 1, True, (piece,)) for number, piece in enumerate(own)}
    names = [ParityName("run", "g", 0, 0, 0, row, scheme.data, scheme.spares) for row in range(8)]
    sums = dict(zip(names, multiply(parity_matrix(8, 8), streams), strict=True))
    for name in names[:damaged]:
        sums[name][100] ^= 1
    known = PiecesInParity([(replace(HERE, port=name.row), HeldParity(name, columns)) for name in names])
    (placed,) = known.placed(own[3].file, 0)
    others = {(piece.file, 0): streams[number] for number, piece in enumerate(own)}
    results = [
        computed(placed.piece, sections, sums, others).tobytes()
        for sections in placed.set.choices(placed.column, placed.piece, lambda piece: piece in own[:4])
    ]
    assert (results[0] == streams[3].tobytes()) == (not damaged)
    assert streams[3].tobytes() in results


@pytest.mark.slow
def test_a_job_loads_the_last_segment_of_lost_hosts_and_the_older_one_is_freed(tmp_path: Path) -> None:
    hosts = [Host.start() for _ in range(3)]
    torch.manual_seed(1)
    model, other = nn.Linear(640, 90), nn.Linear(640, 90)
    optimizer, others = (torch.optim.AdamW(one.parameters(), fused=True) for one in (model, other))
    peers = Peers([host.address for host in hosts], "parity:2+1")
    with Recorder(model, optimizer, tmp_path / "run.chain", peers=peers, prove=False, bases=Bases(every=4)) as recorder:
        for _ in range(6):
            model(torch.randn(8, 640)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.note()
        deadline = time.monotonic() + SECONDS
        while [one.generations for host in hosts[1:] for one in host.pieces.status] != [1, 1]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    (tmp_path / "run.chain").rename(tmp_path / "lost")
    left = ",".join(host.address for host in hosts[1:])
    assert load(f"peers://{left}/run.chain", other, others).step == 6
    assert torch.equal(model.weight, other.weight)
    for host in hosts:
        host.holder.close()


@pytest.mark.slow
def test_hosts_may_be_killed_restarted_and_flipped(tmp_path: Path) -> None:
    report = run(kills(tmp_path / "logs", 5), 6)
    assert report.failures == []


def test_a_part_of_a_parity_of_another_size_is_refused() -> None:
    assert wire.MAX_STORE > 255 * 8 + wire.CHUNK_NBYTES
    with pytest.raises(CkptError):
        parity_requests.parse_sum(bytearray(b'{"offset": 0, "nbytes": 9999999}'))
