"""Lose two of eight hosts of a run, with what they hold and with the chain, and restore its last step from the rest.

    python tests/campaigns/run.py peers_drill --rounds 1          (~1 GB of state; `--seed` chooses which hosts)

Each host is a process of `ckpt hold` and a rank of a recorded run, whose chain is in /dev/shm. Two ranks, their writers
and their holders are killed at once, then the others, and the chain is moved away. What the holders that are left give
must have the bits of that chain at the last step. Four times are measured, each by the clock and in processor seconds:
`load` into a live model of all ranks' parts in a process that has imported torch, as a restart does; a restore to a
checkpoint; the same restore from the chain's own folder; and the pieces alone, read without a replay.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

HOSTS = 8
SCHEMES = ("copies:3", "parity:6+2")
STEPS = 4
SECONDS = 300.0
GB = 1 << 30
_PART = 8 << 20
"""Bytes of a read of pieces."""


def rounds(folder: Path, seed: int) -> Iterator[object]:
    """Rounds without end."""
    from run import Round

    for number in range(1 << 30):
        scheme = SCHEMES[number % len(SCHEMES)]
        yield Round(f"two of {HOSTS} hosts, {scheme}", partial(drill, folder, seed + number, GB, scheme=scheme))


def drill(folder: Path, seed: int, nbytes: int, hosts: int = HOSTS, scheme: str = SCHEMES[0]) -> Mapping[str, int]:
    """One drill with a state of about so many bytes. Returns what it took, in milliseconds: `cpu` of this process."""
    import ckpt
    from ckpt_formats.core.tensor import read
    from ckpt_formats.stores.peers_store import PeersStore, open_peers
    from ckpt_formats.universal.chain import chain_file, states

    draw = random.Random(seed)
    work = Path("/dev/shm") / f"peers-{os.getpid()}-{seed}"
    work.mkdir()
    processes: list[subprocess.Popen[str]] = []
    try:
        addresses = []
        for _ in range(hosts):
            holder = _start("-m", "ckpt_cli", "hold", "--memory", "4G", "--listen", "127.0.0.1:0", "--json")
            processes.append(holder)
            assert holder.stdout is not None
            addresses.append(json.loads(holder.stdout.readline())["address"])
        numel = nbytes // 12 // hosts
        ranks = [
            _start(__file__, str(rank), str(hosts), str(work), str(numel), ",".join(addresses), scheme)
            for rank in range(hosts)
        ]
        processes += ranks
        deadline = time.monotonic() + SECONDS
        while len(list(work.glob("held-*"))) < hosts:
            assert time.monotonic() < deadline, "the holders were not filled in time"
            assert all(one.poll() is None for one in ranks), "a rank has ended"
            time.sleep(0.05)
        figures = {"restored": 1, "memory_mb": _memory(addresses) >> 20}
        lost = sorted(draw.sample(range(hosts), 2))
        for host in lost:
            processes[host].kill()
            ranks[host].kill()
        for rank in ranks:
            rank.kill()
        writers = [int(pid) for one in work.glob("held-*") for pid in one.read_text().split()]
        for pid in writers:
            _kill(pid)
        (work / "run.chain").rename(work / "lost")
        left = [address for host, address in enumerate(addresses) if host not in lost]
        loaded = _start(__file__, "load", str(hosts), str(numel), f"peers://{','.join(left)}/run.chain")
        output = loaded.communicate(timeout=SECONDS)[0]
        assert loaded.returncode == 0, "load failed"
        figures |= json.loads(output.splitlines()[-1])
        with _timed(figures, "peers"):
            path = open_peers(f"peers://{','.join(left)}/run.chain")
            step = states.last_step(path, chain_file.load(path / chain_file.NAME))
            run = ckpt.Chain(path)[step]
            ckpt.Job(run, work / "restored", ckpt.Universal()).run(resources=ckpt.Resources(workers=2))
        assert step == STEPS, f"step {step} of {STEPS}, without hosts {lost}"
        assert isinstance(path.store, PeersStore)
        assert not path.store.damaged
        expected = ckpt.Chain(work / "lost")[step]
        restored = ckpt.open(work / "restored")
        for (name, state, before), (_, _, after) in zip(expected.tensors(), restored.tensors(), strict=True):
            assert (read(before) == read(after)).all(), f"{name} {state} differs, without hosts {lost}"
        figures["nbytes"] = sum(path.store.nbytes_from.values())
        figures["computed_nbytes"] = path.store.nbytes_computed
        with _timed(figures, "folder"):
            ckpt.Job(expected, work / "again", ckpt.Universal()).run(resources=ckpt.Resources(workers=2))
        pieces = open_peers(f"peers://{','.join(left)}/run.chain")
        with _timed(figures, "pieces"):
            for file in (one for one in pieces.rglob("*") if one.is_file()):
                for offset in range(0, file.stat().st_size, _PART):
                    pieces.store.get(file.key, offset, min(_PART, file.stat().st_size - offset))
        return figures
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        subprocess.run(["rm", "-rf", str(work)], check=True)


def _memory(addresses: list[str]) -> int:
    """The bytes that all holders hold."""
    from ckpt_formats.stores.address import parse_address
    from ckpt_formats.stores.connection import Connection
    from ckpt_formats.stores.http_client import Credentials
    from ckpt_formats.stores.piece_requests import holder_status

    total = 0
    for address in addresses:
        with closing(Connection(parse_address(address), Credentials(), "holder")) as connection:
            total += holder_status(connection).nbytes
    return total


@contextmanager
def _timed(figures: dict[str, int], name: str) -> Iterator[None]:
    """Note the milliseconds that something takes, and those of the processor."""
    begin, cpu = time.monotonic(), time.process_time()
    yield
    figures[f"{name}_ms"] = round((time.monotonic() - begin) * 1000)
    figures[f"{name}_cpu_ms"] = round((time.process_time() - cpu) * 1000)


def _start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def train(rank: int, world: int, work: Path, numel: int, addresses: list[str], scheme: str) -> None:
    """Train one rank's part of a model, until the hosts hold its last step; then wait to be killed."""
    import torch
    from torch import distributed, nn

    from ckpt.holding.peers import HELD
    from ckpt_recorder import Peers, Recorder

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    distributed.init_process_group("gloo", init_method=f"file://{work}/store", rank=rank, world_size=world)
    model = nn.ParameterList([nn.Parameter(torch.randn(numel // 4)) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    peers = Peers(addresses, scheme)
    recorder = Recorder(
        model, optimizer, work / "run.chain", peers=peers, prove=False, rename=lambda name: f"parts.{rank}.{name}"
    )
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        recorder.note()
    time.sleep(1.0)
    while True:
        recorder.note()
        if len(recorder.peers) == len(peers.holders_of(rank)) + len(peers.parities_of(rank)) and set(
            recorder.peers.values()
        ) == {HELD}:
            break
        time.sleep(0.1)
    time.sleep(2.0)  # rank 0 looks at the chain's list twice a second
    draft = work / f"draft-{rank}"
    draft.write_text(str(recorder.writer_pid))
    draft.rename(work / f"held-{rank}")
    time.sleep(SECONDS)


def load(world: int, numel: int, source: str) -> None:
    """Load all ranks' parts into one live model, and print the milliseconds that it takes."""
    import torch
    from torch import nn

    import ckpt
    from ckpt_training import load

    torch.set_num_threads(1)
    model = nn.ModuleDict(
        {
            "parts": nn.ModuleDict(
                {
                    str(rank): nn.ParameterList([nn.Parameter(torch.zeros(numel // 4)) for _ in range(4)])
                    for rank in range(world)
                }
            )
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    figures: dict[str, int] = {}
    with _timed(figures, "load"):
        loaded = load(source, model, optimizer, resources=ckpt.Resources(workers=2))
    assert loaded.step == STEPS
    figures |= {f"load_{stage}_ms": round(seconds * 1000) for stage, seconds in loaded.seconds.items()}
    print(json.dumps(figures))


if __name__ == "__main__" and sys.argv[1] == "load":
    load(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
elif __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5].split(","), sys.argv[6])
