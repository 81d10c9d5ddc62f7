"""What holders have is freed only where that cannot take the last whole save, and is sent again where it was freed."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.holding import generation_watch
from ckpt.holding.generation import SentGeneration
from ckpt.holding.generation_watch import GenerationWatch
from ckpt.holding.holder import HeldPieces, Holder
from ckpt.holding.peers import HELD, Peers
from ckpt.holding.save_sender import SaveSender
from ckpt_formats.core.errors import IncompleteError, NotFoundError
from ckpt_formats.stores import piece_requests
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.peers_store import open_peers
from ckpt_formats.stores.piece_requests import PieceName, SentPiece, digest_of

SECONDS = 120.0
HOSTS = 4


class Hosts:
    """Holders of a run, each with memory of its own."""

    def __init__(self, count: int, scheme: str) -> None:
        self.pieces = [HeldPieces(1 << 26) for _ in range(count)]
        self.holders = [Holder(one, NetworkAddress("127.0.0.1", 0)) for one in self.pieces]
        self.peers = Peers([str(one.address) for one in self.holders], scheme, run="run")

    def put(self, generation: str, created: int, rank: int, *, is_whole: bool) -> None:
        """Let a job have sent the file of a rank, or the first part of it, and the list with that of rank 0."""
        files = [f"step-{created}/packs/{rank:05d}.safetensors", *(["chain.json"] if is_whole and not rank else [])]
        for host, file in ((host, file) for host in self.peers.holders_of(rank) for file in files):
            name, content = PieceName("run", generation, file, 0), bytearray(b"values")
            sent = SentPiece(name, digest_of(content), created, is_whole, False, len(self.holders), created)
            self.pieces[host].store(sent, content)

    @property
    def generations(self) -> list[set[str]]:
        return [set(one.run("run")) for one in self.pieces]


def generation(created: int, world: int) -> SentGeneration:
    def main_file(rank: int) -> str:
        return f"step-{created}/packs/{rank:05d}.safetensors"

    return SentGeneration("run", f"save-{created}", created, world, main_file, created, is_recorded=False)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Of which all have a whole save, and two a newer one that a killed job has left."""
    hosts = Hosts(HOSTS, "copies:1")
    for rank in range(HOSTS):
        hosts.put("save-10", 10, rank, is_whole=True)
    for rank in (0, 2):
        hosts.put("save-20", 20, rank, is_whole=False)
    yield hosts
    for one in hosts.holders:
        one.close()


def test_the_whole_save_is_not_freed_while_a_holder_does_not_answer(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = hosts.holders[3].address

    def connection(address: NetworkAddress, *arguments: Any) -> Connection:
        if address == silent:
            raise NotFoundError("does not answer for a moment")
        return Connection(address, *arguments)

    watch = GenerationWatch(hosts.peers, generation(30, HOSTS), Credentials())
    with monkeypatch.context() as patch:
        patch.setattr(generation_watch, "Connection", connection)
        watch.look()
    assert hosts.generations == [{"save-10"}, {"save-10"}, {"save-10"}, {"save-10", "save-20"}]
    watch.look()
    assert hosts.generations == [{"save-10"}] * HOSTS


def test_a_save_is_whole_once_its_holders_have_the_last_piece_of_each_rank() -> None:
    """Only then is the one before it freed."""
    hosts = Hosts(3, "copies:1")
    watch = GenerationWatch(hosts.peers, generation(20, 3), Credentials())
    for rank in range(3):
        hosts.put("save-20", 20, rank, is_whole=rank < 2)
    watch.look()
    assert not watch.is_whole
    last = PieceName("run", "save-20", "step-20/packs/00002.safetensors", len(b"values"))
    for host in hosts.peers.holders_of(2):
        hosts.pieces[host].store(SentPiece(last, digest_of(b"end"), 20, True, False, 3, 20), bytearray(b"end"))
    watch.look()
    for one in hosts.holders:
        one.close()
    assert watch.is_whole


def test_a_job_that_is_late_frees_nothing_that_is_newer_than_its_own(hosts: Hosts) -> None:
    before = hosts.generations
    GenerationWatch(hosts.peers, generation(15, HOSTS), Credentials()).look()
    assert hosts.generations == before


def test_a_save_of_which_a_rank_is_missing_is_not_read() -> None:
    hosts = Hosts(3, "copies:1")
    url = f"peers://{','.join(hosts.peers.hosts)}/run"
    for rank in range(2):
        hosts.put("save-10", 10, rank, is_whole=True)
    with pytest.raises(IncompleteError, match="all ranks"):
        open_peers(url)
    hosts.put("save-10", 10, 2, is_whole=True)
    assert (open_peers(url) / "step-10/packs/00002.safetensors").read_bytes() == b"values"
    for one in hosts.holders:
        one.close()


def test_a_list_that_is_replaced_takes_the_memory_of_one() -> None:
    pieces, name = HeldPieces(1 << 20), PieceName("run", "save-10", "chain.json", 0)
    for size in (100, 300, 200):
        content = bytearray(size)
        pieces.store(SentPiece(name, digest_of(content), 10, True, True, 1, 10), content)
    after = pieces.nbytes
    assert pieces.drop("run", 1 << 60) == 0
    pieces.store(SentPiece(name, digest_of(content), 10, True, True, 1, 10), content)
    assert pieces.nbytes == after


def test_lists_of_all_pieces_become_rare_while_older_generations_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, list_run, looks = Hosts(3, "parity:2+1"), piece_requests.list_run, list[bool]()
    for name, created in (("save-10", 10), ("save-20", 20)):
        for rank in range(3):
            hosts.put(name, created, rank, is_whole=True)

    def counted(*arguments: Any, **options: Any) -> Any:
        looks.append(options["with_pieces"])
        return list_run(*arguments, **options)

    monkeypatch.setattr(piece_requests, "list_run", counted)
    watch = GenerationWatch(hosts.peers, generation(30, 3), Credentials())
    for _ in range(8):
        watch.look()
    for one in hosts.holders:
        one.close()
    assert hosts.generations == [{"save-10", "save-20"}] * 3
    assert (looks.count(False), looks.count(True)) == (8 * 3, 3 * 3), "at looks 1, 3 and 7"


def test_a_sender_that_is_closed_while_holders_are_asked_frees_nothing(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = GenerationWatch(hosts.peers, generation(30, HOSTS), Credentials())
    before, list_run, count = hosts.generations, piece_requests.list_run, 0

    def list_two(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            watch.close()
        return list_run(*arguments, **options)

    monkeypatch.setattr(piece_requests, "list_run", list_two)
    watch.look()
    assert hosts.generations == before


@pytest.mark.slow
@pytest.mark.parametrize("is_idle", [False, True], ids=["while a save is sent", "after it was sent"])
def test_a_holder_of_parity_that_was_let_free_it_gets_all_of_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    monkeypatch.setattr("ckpt.holding.holder_link._CHECK_SECONDS", 0.2)
    hosts = Hosts(3, "parity:2+1")
    (tmp_path / "packs").mkdir()
    add, added = HeldPieces.add, list[Any]()

    def add_and_free(self: HeldPieces, *arguments: Any) -> int:
        nbytes = add(self, *arguments)
        if self is hosts.pieces[2]:
            added.append(arguments)
            if len(added) == 2 and not is_idle:
                self.drop("run", 1 << 60)
        return nbytes

    monkeypatch.setattr(HeldPieces, "add", add_and_free)
    for rank in range(6):
        (tmp_path / f"packs/{rank:05d}.safetensors").write_bytes(os.urandom(5 << 19))
    say = lambda address, state: None  # noqa: E731
    senders = [SaveSender(hosts.peers, generation(10, 6), tmp_path, rank, None, say) for rank in range(6)]
    links = [link for one in senders for link in one.links]

    def nbytes() -> list[int]:
        columns = [column for one in hosts.pieces[2].parities("run") for column in one.columns.values()]
        files = hosts.pieces[2].run("run").get("save-10", {}).values()
        return sorted([sum(piece.nbytes for piece in one.pieces) for one in columns] + [one.nbytes for one in files])

    deadline = time.monotonic() + SECONDS
    try:
        if is_idle:
            while not all(link.text == HELD for link in links):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            hosts.pieces[2].drop("run", 1 << 60)
            add(hosts.pieces[2], *added[0])  # by the rank that notices it first
        # Two ranks are of this host. Of each of the 4 others, one piece of three is in this host's parities.
        while nbytes() != [1 << 20] * 4 + [5 << 19] * 2:
            assert time.monotonic() < deadline, nbytes()
            time.sleep(0.02)
    finally:
        for one in senders:
            one.abandon()
        for holder in hosts.holders:
            holder.close()
