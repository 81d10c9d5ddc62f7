"""Saves of live jobs are in the memory of other hosts, too: whole or not there, and never in the way of the job."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.chains.write import DeltaPolicy
from ckpt.holding.holder import HeldPieces, Holder
from ckpt.holding.peers import HELD
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.stores import piece_requests
from ckpt_formats.stores.address import NetworkAddress, parse_address
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.parity_requests import ParityName, ParityPlace
from ckpt_formats.stores.peers_store import PeersStore, open_peers
from ckpt_formats.stores.piece_requests import PieceName, SentPiece, digest_of
from ckpt_recorder import Recorder
from ckpt_training import Peers, Saver, load
from ckpt_training.writing.peer_saves import PeerSaves
from ckpt_training.writing.save_orders import SaveSettings
from damage import ckpt as command

SECONDS = 60.0
SCRIPT = Path(__file__).parents[1] / "jobs/saving_jobs/save_to_peers.py"
RANKS = 3


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def nbytes_of(address: str) -> int:
    """The bytes that a holder has."""
    with closing(Connection(parse_address(address), Credentials(), "holder", 5.0)) as connection:
        return piece_requests.holder_status(connection).nbytes


def bits(checkpoint: ckpt.Checkpoint) -> dict[str, bytes]:
    return {f"{one.name} {state}": read(tensor).tobytes() for one, state, tensor in checkpoint.tensors()}


class Job:
    """A run of one rank."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(200, 200)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.model(torch.randn(4, 200)).square().mean().backward()
        self.optimizer.step()


@pytest.fixture
def start() -> Iterator[Callable[..., tuple["subprocess.Popen[str]", str]]]:
    """Starts a holder in a process of its own, and returns it and its address."""
    processes = []

    def begin(address: str = "127.0.0.1:0") -> tuple["subprocess.Popen[str]", str]:
        arguments = ["-m", "ckpt_cli", "hold", "--memory", "64M", "--listen", address, "--json"]
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())["address"]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("scheme", ["copies:2", "parity:2+1"])
def test_saves_of_several_ranks_outlive_a_host_and_the_folder_and_a_holder_that_was_started_again(
    tmp_path: Path, start: Callable[..., tuple["subprocess.Popen[str]", str]], scheme: str
) -> None:
    holders, addresses = map(list, zip(*(start() for _ in range(RANKS)), strict=True))
    arguments = [str(RANKS), str(tmp_path), ",".join(addresses), scheme]
    ranks = subprocess.Popen([sys.executable, str(SCRIPT), *arguments], start_new_session=True)
    try:
        wait_until(lambda: len(list(tmp_path.glob("held-1-*"))) == RANKS)
        held = nbytes_of(addresses[2])
        holders[2].kill()
        holders[2].wait()
        holders[2], _ = start(addresses[2])
        # Until it has all again, the next save is not sent, which would take the place of the only whole one.
        wait_until(lambda: nbytes_of(addresses[2]) == held)
        time.sleep(1.0)  # rank 0 looks twice a second
        (tmp_path / "go").touch()
        wait_until(lambda: len(list(tmp_path.glob("held-2-*"))) == RANKS)
        holders[1].kill()
        os.killpg(ranks.pid, signal.SIGKILL)
        for path in tmp_path.glob("held-2-*"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        (tmp_path / "run").rename(tmp_path / "lost")
        # With copies, only the holder that was started again is left with rank 0's part; with parity, rank 1's part is
        # the sum of what both others have.
        left = f"peers://{addresses[0]},{addresses[2]}/run"
        done = command("restore", left, tmp_path / "restored", "--json")
        assert done.code == 0, done.err
        assert (json.loads(done.out)["peers"]["computed_nbytes"] > 0) == (scheme == "parity:2+1")
        saved = ckpt.open(tmp_path / "lost/step-00000002")
        assert bits(ckpt.open(tmp_path / "restored")) == bits(saved)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()


@pytest.mark.slow
def test_a_save_replaces_the_one_before_only_when_it_is_whole_and_a_holder_that_is_full_says_so(
    tmp_path: Path,
) -> None:
    job, other = Job(), Job()
    pieces = [HeldPieces(memory) for memory in (1 << 24, 1 << 24, 700_000)]
    hosts = [Holder(one, NetworkAddress("127.0.0.1", 0)) for one in pieces]
    addresses = [str(host.address) for host in hosts]

    def steps() -> list[int]:
        stores = [open_peers(f"peers://{address}/run").store for address in addresses[1:]]
        return [store.step for store in stores if isinstance(store, PeersStore)]

    try:
        with Saver(job.model, job.optimizer, tmp_path / "run", peers=Peers(addresses)) as saver:
            job.step()
            saver.save(10).wait(SECONDS)
            wait_until(lambda: list(saver.peers.values()) == [HELD, HELD])
            job.step()
            saver.save(20).wait(SECONDS)
            wait_until(lambda: any("may use" in one for one in saver.peers.values()))
            wait_until(lambda: saver.peers[addresses[1]] == HELD)
            # The holder that is full has step 10 as it was, so the other one frees nothing.
            assert [one.generations for memory in pieces for one in memory.status] == [2, 1]
            assert steps() == [20, 10]
            saver.save(30).wait(SECONDS)
            wait_until(lambda: "step 30 is not sent" in saver.peers[addresses[1]])
        assert (tmp_path / "run/step-00000030").is_dir()
        pieces[2].memory = 1 << 24
        with Saver(job.model, job.optimizer, tmp_path / "run", peers=Peers(addresses)) as saver:
            saver.save(40).wait(SECONDS)
            wait_until(lambda: [one.generations for memory in pieces for one in memory.status] == [1, 1])
        (tmp_path / "run").rename(tmp_path / "lost")
        assert load(f"peers://{addresses[2]}/run", other.model, other.optimizer).step == 40
        assert torch.equal(other.model.weight, job.model.weight)
        assert steps() == [40, 40]
    finally:
        for host in hosts:
            host.close()


def leave(pieces: HeldPieces, created: int, parity: ParityName | None) -> None:
    """Let a killed job have left half a save: a piece, or a parity of it."""
    content = bytearray(500_000)
    name = PieceName("run", "killed-15", "step-0000000015/packs/00000.safetensors", 0)
    sent = SentPiece(name, digest_of(content), 15, False, False, 1, created)
    if parity is None:
        pieces.store(sent, content)
    else:
        pieces.add(ParityPlace(replace(parity, generation="killed-15"), 0, 0, 0, 0), sent, content)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["copies:1", "parity:2+1"])
def test_memory_for_two_saves_has_room_for_the_next_one_after_what_killed_jobs_have_left(
    tmp_path: Path, scheme: str
) -> None:
    job = Job()
    is_parity = scheme == "parity:2+1"
    memories = (1_200_000, 2_700_000, 2_700_000) if is_parity else (1 << 24, 1_200_000)  # a parity takes whole MiB
    pieces = [HeldPieces(memory) for memory in memories]
    hosts = [Holder(one, NetworkAddress("127.0.0.1", 0)) for one in pieces]
    peers = Peers([str(host.address) for host in hosts], scheme)
    of_copies = pieces[:1] if is_parity else pieces[1:]

    def generations() -> list[set[str]]:
        own = [set(one.run("run")) for one in of_copies]
        return own + [{parity.name.generation for parity in one.parities("run")} for one in pieces[1:] if is_parity]

    try:
        for step in (10, 20):
            job.step()
            with Saver(job.model, job.optimizer, tmp_path / "run", peers=peers) as saver:
                saver.save(step).wait(SECONDS)
                wait_until(lambda: list(saver.peers.values()) == [HELD] * len(generations()))
                if step == 10:
                    ((first,), *_) = generations()
                    created = next(iter(of_copies[0].run("run")[first].values())).created + 1
                    leave(of_copies[0], created, None)
                    for one in pieces[1:] if is_parity else []:
                        leave(one, created, one.parities("run")[0].name)
                    full = [one for one in pieces if one.nbytes > one.memory * 3 // 4]
                    assert len(full) == 1 + is_parity  # no room for a third save; one piece is in one of two parities
                    continue
                wait_until(lambda: [len(one) for one in generations()] == [1] * len(generations()))
        assert {first} not in generations()
        hosts[0].close()
        (tmp_path / "run").rename(tmp_path / "lost")
        saved = job.model.weight.clone()
        job.step()
        assert load(f"peers://{','.join(peers.hosts[1:])}/run", job.model, job.optimizer).step == 20
        assert torch.equal(job.model.weight, saved)
    finally:
        for host in hosts:
            host.close()


class HeldLate(HeldPieces):
    """Stores the pieces of a step when it is let."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.let = {10: threading.Event(), 20: threading.Event()}

    def store(self, piece: SentPiece, content: bytearray) -> int:
        self.let[piece.step].wait(SECONDS)
        return super().store(piece, content)


def peer_saves(folder: Path, peers: Peers, lines: list[str]) -> PeerSaves:
    """What sends saves of one rank, and in the folder a save that has only a pack."""
    numbers = {"slot_nbytes": 64, "slots": 1, "seconds": 0.0, "rank": 0, "ranks": 1}
    nothing = dict.fromkeys(("codec", "dcp_keys", "then", "protect", "base_every"))
    pack = folder / "save/packs/00000.safetensors"
    pack.parent.mkdir(parents=True)
    pack.write_bytes(bytes(range(100)))
    settings = SaveSettings(
        target=str(folder), token="t", deltas=False, check=False, peers=asdict(peers), **numbers, **nothing
    )
    return PeerSaves(settings, lines.append)


def test_a_save_in_whose_place_a_newer_one_is_sent_says_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 5)  # a clock that stands still, or goes back
    pieces, lines = HeldLate(), list[str]()
    host = Holder(pieces, NetworkAddress("127.0.0.1", 0))
    saves = peer_saves(tmp_path, Peers(["127.0.0.1:1", str(host.address)], "copies:1"), lines)
    try:
        times = [saves.takes(10)]
        saves.send(tmp_path / "save", 10, times[0] or 0, None)
        given_up = saves._sender
        assert given_up is not None
        times.append(saves.takes(20))
        assert times == [5, 6]
        saves.send(tmp_path / "save", 20, times[1] or 0, None)
        pieces.let[10].set()
        for link in given_up.links:
            link.thread.join(SECONDS)
        assert not any(HELD in line for line in lines)
        pieces.let[20].set()
        wait_until(lambda: any(HELD in line for line in lines))
        assert [line.partition(f"{host.address} ")[2] for line in lines] == ["gets step 10", "gets step 20", HELD]
    finally:
        for event in pieces.let.values():
            event.set()
        saves.close(is_orphan=False)
        host.close()


def test_a_holder_does_not_seem_to_hold_all_after_an_error_that_nobody_foresaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, store = list[str](), piece_requests.store

    def fail(*arguments: Any) -> None:
        monkeypatch.setattr(piece_requests, "store", store)
        raise ValueError("once")

    monkeypatch.setattr(piece_requests, "store", fail)
    host = Holder(HeldPieces(1 << 24), NetworkAddress("127.0.0.1", 0))
    saves = peer_saves(tmp_path, Peers(["127.0.0.1:1", str(host.address)], "copies:1"), lines)
    try:
        saves.send(tmp_path / "save", 10, 1, None)
        wait_until(lambda: any(HELD in line for line in lines))
        assert "ValueError: once" in lines[1]
    finally:
        saves.close(is_orphan=False)
        host.close()


@pytest.mark.parametrize(
    "options",
    [
        {"target": "run.chain", "policy": DeltaPolicy()},
        {"target": "run", "format": ckpt.DCP()},
    ],
    ids=["chain", "dcp"],
)
def test_saver_refuses_peers_for_what_they_cannot_hold(options: dict[str, Any], tmp_path: Path) -> None:
    job = Job()
    options = {"peers": Peers(["a:1", "b:1", "c:1"]), **options}
    with pytest.raises(UnsupportedError, match="memory of peers"):
        Saver(job.model, job.optimizer, tmp_path / options.pop("target"), **options)


@pytest.mark.parametrize("kind", [Saver, Recorder])
def test_a_folder_whose_name_no_address_of_peers_can_have_is_refused(kind: type[Any], tmp_path: Path) -> None:
    job, peers = Job(), Peers(["a:1", "b:1", "c:1"])
    with pytest.raises(InvalidArgumentError, match="cannot be the name of a run"):
        kind(job.model, job.optimizer, tmp_path / "my run", peers=peers)
