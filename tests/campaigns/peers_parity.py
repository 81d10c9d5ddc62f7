"""Kill hosts that hold parity of each other's log, at any moment, and restore what the others have.

    python tests/campaigns/run.py peers_parity --rounds 200

A run of several ranks is recorded once, with torch. In each round, processes hold (`Holder`), and others send what the
ranks recorded (`LogSender`), as far as a clock lets it grow. Hosts are killed with both, in the middle of it or when
all is held; holders are killed alone, and started again; a bit is flipped in the memory of a holder. Then the chain is
read from the holders that are left: it must have the bits that the recorded one has at the same step, and it may be an
error only if no start was whole.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from threading import Event
from typing import Any

from ckpt.holding.holder import HeldPieces, Holder
from ckpt.holding.peers import Peers
from ckpt.holding.sender import LogSender
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.tensor import read
from ckpt_formats.parity.scheme import PeerScheme
from ckpt_formats.stores import parity_requests, piece_requests
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.parity_requests import HeldParity
from ckpt_formats.stores.peers_store import PeersStore, open_peers
from ckpt_formats.stores.piece_requests import HeldRun
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.gradients.record import HEAD, RankLog
from ckpt_formats.universal.gradients.segment import open_segment, rank_file

RANKS = 6
STEPS = 5
NUMEL = 120_000
"""Of the parameters of a rank: its start has 1.4 MB, in more than one piece."""
SECONDS = 60.0


def rounds(folder: Path, seed: int) -> Iterator[object]:
    """Rounds without end."""
    from run import Round

    recorded = Recorded.of(folder)
    for number in range(1 << 30):
        way = ("settled", "running", "restarted", "flipped")[number % 4]
        work = folder / f"round-{number}"
        yield Round(way, partial(one_round, recorded, work, seed * 1_000_003 + number, way))


@dataclass(frozen=True)
class Recorded:
    """A recorded run, and a hash of its values at each step."""

    chain: Path
    truth: Mapping[int, str]

    @classmethod
    def of(cls, folder: Path) -> Recorded:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, __file__, "record", str(folder)], check=True, env=_environment())
        chain = folder / "run.chain"
        return cls(chain, {step: hash_at(chain, step) for step in range(STEPS + 1)})


def hash_at(path: Path, step: int) -> str:
    """A hash of all values of a step."""
    digest = sha256()
    for name, state, tensor in states.open_state(path, chain_file.load(path / chain_file.NAME), step).tensors():
        digest.update(f"{name} {state} ".encode())
        digest.update(read(tensor).tobytes())
    return digest.hexdigest()


def one_round(recorded: Recorded, work: Path, seed: int, way: str) -> Mapping[str, int]:
    """One round. Returns what was seen."""
    draw = random.Random(seed)
    count = draw.choice([3, 6, 6, 7])
    schemes = [(k, m) for k in range(2, count) for m in range(1, min(count - k, 3) + 1)]
    data, spares = draw.choice(schemes)
    scheme = PeerScheme(data, spares)
    jump = draw.randint(1, count // scheme.hosts)
    work.mkdir()
    hosts = Hosts(recorded.chain, work, str(scheme), jump, count, draw.getrandbits(32))
    text = f"seed {seed}: {way}, {scheme}, {count} hosts, jump {jump}"
    seen = {str(way): 1}
    try:
        if way == "running":
            time.sleep(draw.uniform(0.2, 1.2))
            was_whole = (work / "whole").exists()
        else:
            if way == "restarted":
                time.sleep(draw.uniform(0.0, 0.6))
                hosts.restart(draw.randrange(count))
            hosts.wait()
            was_whole = True
        limit = spares - (way == "flipped")
        groups = [draw.sample(list(group), draw.randint(0, limit)) for group in scheme.groups(count, jump)]
        lost = sorted(host for group in groups for host in group)
        hosts.kill(lost)
        flipped = draw.choice([one for one in range(count) if one not in lost])
        if way == "flipped":
            hosts.flip(flipped)
        left = [hosts.addresses[one] for one in range(count) if one not in lost]
        try:
            path = open_peers(f"peers://{','.join(left)}/run.chain")
            assert isinstance(path.store, PeersStore)
            step = states.last_step(path, chain_file.load(path / chain_file.NAME))
            result = hash_at(path, step)
        except CkptError as error:
            if was_whole:
                raise AssertionError(f"{text}: without {lost}") from error
            return {**seen, "no start": 1}
        assert result == recorded.truth[step], f"{text}: step {step} differs without {lost}"
        assert way == "running" or step == STEPS, f"{text}: step {step} without {lost}"
        damaged = {(one.holder, one.is_parity) for one in path.store.damaged}
        assert {holder for holder, _ in damaged} <= {hosts.addresses[flipped]}, f"{text}: {damaged}"
        assert way == "flipped" or not damaged, f"{text}: {damaged}"
        if path.store.nbytes_computed:
            seen["computed"] = 1
        for _, is_parity in damaged:
            seen["named parity" if is_parity else "named piece"] = 1
        return {**seen, f"{len(lost)} lost": 1}
    finally:
        hosts.close()


class Hosts:
    """Processes that hold, and processes that send: two for each host."""

    def __init__(self, chain: Path, work: Path, scheme: str, jump: int, count: int, seed: int) -> None:
        self._chain, self._work, self._count = chain, work, count
        self._processes: dict[tuple[str, int], Any] = {}
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["peers_parity"])
        self.addresses = [f"127.0.0.1:{_free_port()}" for _ in range(count)]
        for host in range(count):
            self._start("hold", host, hold, (self.addresses[host], seed + host))
        fields = {"hosts": self.addresses, "scheme": scheme, "jump": jump, "run": "run.chain"}
        self._peers = Peers(**fields)
        for host in range(count):
            self._start("send", host, send, (str(chain), str(work), json.dumps(fields), host, seed))

    def _start(self, what: str, host: int, function: Any, arguments: tuple[object, ...]) -> None:
        process = self._context.Process(target=function, args=arguments, daemon=True)
        process.start()
        self._processes[what, host] = process

    def wait(self) -> None:
        """Wait until all is held by all, as they say themselves."""
        deadline = time.monotonic() + SECONDS
        while not self._are_filled():
            assert time.monotonic() < deadline, "not all is held"
            time.sleep(0.1)

    def _are_filled(self) -> bool:
        with suppress(CkptError):
            answers = [_ask(address) for address in self._peers.addresses]
            (segment,) = {one.parent for one in self._chain.glob("*/layout.json")}
            for rank in range(RANKS):
                name = f"{segment.name}/{rank_file(rank)}"
                size = (self._chain / name).stat().st_size
                host, lane = self._peers.host_of(rank, RANKS), self._peers.lane_of(rank, RANKS)
                files = [files for files in answers[host][0].values() if name in files]
                if not files or files[0][name].nbytes < size:
                    return False
                added = Counter[int]()
                for one in self._peers.sets_of(host):
                    for row, holder in enumerate(one.parities):
                        key = (one.group, one.number, lane, row)
                        held = [
                            parity.columns.get(one.data.index(host))
                            for parity in answers[holder][1]
                            if (parity.name.group, parity.name.number, parity.name.lane, parity.name.row) == key
                        ]
                        if held[:1] in ([], [None]) or not held[0].is_marked:
                            return False
                        added[row] += sum(piece.nbytes for piece in held[0].pieces)
                if set(added.values()) != {size}:
                    return False
            spares = self._peers.parities_of(0)[: self._peers.parsed.spares]
            return all(any(chain_file.NAME in files for files in answers[host][0].values()) for host in (0, *spares))
        return False

    def restart(self, host: int) -> None:
        """Kill a holder, and start it again."""
        self._kill(("hold", host))
        self._start("hold", host, hold, (self.addresses[host], 0))

    def flip(self, host: int) -> None:
        """Flip a bit in the memory of a holder."""
        os.kill(self._processes["hold", host].pid, signal.SIGUSR1)
        time.sleep(0.1)

    def kill(self, hosts: list[int]) -> None:
        for host in hosts:
            self._kill(("hold", host))
            self._kill(("send", host))

    def close(self) -> None:
        for key in list(self._processes):
            self._kill(key)

    def _kill(self, key: tuple[str, int]) -> None:
        process = self._processes.pop(key, None)
        if process is not None:
            process.kill()
            process.join()


def hold(address: str, seed: int) -> None:
    """Hold until killed. SIGUSR1 flips a bit of what is held."""
    host, _, port = address.rpartition(":")
    pieces = HeldPieces(1 << 28)
    draw = random.Random(seed)

    def flip(number: int, frame: object) -> None:
        held = [piece for one in pieces._runs.get("run.chain", {}).values() for f in one.values() for piece in f.pieces]
        sums = [
            block.data
            for one in pieces._parities.get("run.chain", {}).values()
            for buffer in one.values()
            for block in buffer._blocks.values()
        ]
        parts = draw.choice([own for own in (held, sums) if own])
        part = draw.choice(parts)
        limit = len(part) if parts is held else min(len(part), 1 << 18)
        part[draw.randrange(limit)] ^= 1 << draw.randrange(8)

    signal.signal(signal.SIGUSR1, flip)
    deadline = time.monotonic() + 5
    while True:
        try:
            Holder(pieces, NetworkAddress(host, int(port)))
            break
        except CkptError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    Event().wait()


def send(chain: str, work: str, fields: str, host: int, seed: int) -> None:
    """Send what the ranks of a host record, which grows from record to record."""
    peers, draw = Peers(**json.loads(fields)), random.Random(seed + host)
    segment = Path(chain) / next(one.folder for one in chain_file.load(Path(chain) / chain_file.NAME).segments)
    logs = open_segment(segment).logs
    ranks = [rank for rank in range(len(logs)) if peers.host_of(rank, len(logs)) == host]
    senders = {rank: LogSender(peers, segment, rank, lambda address, text: None) for rank in ranks}
    grows = [(rank, *one) for rank in ranks for one in zip(logs[rank].records, _ends(logs[rank]), strict=True)]
    grows.sort(key=lambda one: one[1].step)
    for rank, record, end in grows:
        senders[rank].advance(end, record.kind, record.step)
        time.sleep(draw.uniform(0, 0.02))
    whole = Path(work) / "whole"
    while True:
        if 0 in senders and not whole.exists() and senders[0]._is_whole():
            whole.touch()
        time.sleep(0.02)


def _ask(address: NetworkAddress) -> tuple[HeldRun, tuple[HeldParity, ...]]:
    with closing(Connection(address, Credentials(), "holder", 5.0)) as one:
        return piece_requests.list_run(one, "run.chain"), parity_requests.list_parities(one, "run.chain")


def _ends(log: RankLog) -> list[int]:
    """Where each record ends in the file."""
    return [record.begin - HEAD.size for record in log.records[1:]] + [log.end]


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def record(folder: Path) -> None:
    """Record a run of several ranks, each a child of this process, which has torch already."""
    import torch
    from torch import distributed, nn

    from ckpt_recorder import Recorder

    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child:
            children.append(child)
            continue
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
        model = nn.ParameterList([nn.Parameter(torch.randn(NUMEL + 1000 * rank))])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with Recorder(
            model, optimizer, folder / "run.chain", prove=False, rename=lambda name, rank=rank: f"part{rank}.{name}"
        ):
            for _ in range(STEPS):
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
        os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    record(Path(sys.argv[2]))
