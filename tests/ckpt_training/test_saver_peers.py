"""Saves of live jobs are in the memory of other hosts, too: whole or not there, and never in the way of the job."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.chains.write import DeltaPolicy
from ckpt.holding.holder import HeldPieces, Holder
from ckpt.holding.peers import HELD
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.peers_store import PeersStore, open_peers
from ckpt_training import Peers, Saver, load
from damage import ckpt as command

SECONDS = 60.0
SCRIPT = Path(__file__).parents[1] / "jobs/saving_jobs/save_to_peers.py"
RANKS = 3


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
def test_saves_of_several_ranks_outlive_a_host_and_the_folder_and_a_holder_that_was_started_again(
    tmp_path: Path, start: Callable[..., tuple["subprocess.Popen[str]", str]]
) -> None:
    holders, addresses = map(list, zip(*(start() for _ in range(RANKS)), strict=True))
    arguments = [str(RANKS), str(tmp_path), ",".join(addresses)]
    ranks = [subprocess.Popen([sys.executable, str(SCRIPT), str(rank), *arguments]) for rank in range(RANKS)]
    try:
        wait_until(lambda: len(list(tmp_path.glob("held-1-*"))) == RANKS)
        holders[2].kill()
        holders[2].wait()
        holders[2], _ = start(addresses[2])
        (tmp_path / "go").touch()
        wait_until(lambda: len(list(tmp_path.glob("held-2-*"))) == RANKS)
        holders[1].kill()
        for one in ranks:
            one.kill()
        for path in tmp_path.glob("held-2-*"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        (tmp_path / "run").rename(tmp_path / "lost")
        # Of rank 0's part, only the holder that was started again is left: rank 0's own host holds that of the others.
        left = f"peers://{addresses[0]},{addresses[2]}/run"
        done = command("restore", left, tmp_path / "restored")
        assert done.code == 0, done.err
        saved = ckpt.open(tmp_path / "lost/step-00000002")
        assert bits(ckpt.open(tmp_path / "restored")) == bits(saved)
    finally:
        for one in ranks:
            one.kill()
            one.wait()


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


@pytest.mark.parametrize(
    "options",
    [
        {"target": "run.chain", "policy": DeltaPolicy()},
        {"target": "run", "format": ckpt.DCP()},
        {"target": "run", "peers": Peers(["a:1", "b:1", "c:1"], "parity:2+1")},
    ],
    ids=["chain", "dcp", "parity"],
)
def test_saver_refuses_peers_for_what_they_cannot_hold(options: dict[str, Any], tmp_path: Path) -> None:
    job = Job()
    options = {"peers": Peers(["a:1", "b:1", "c:1"]), **options}
    with pytest.raises(UnsupportedError, match=r"held as copies|memory of peers"):
        Saver(job.model, job.optimizer, tmp_path / options.pop("target"), **options)
