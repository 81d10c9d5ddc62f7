"""Kill hosts that hold parity of each other's log, at any moment, and restore what the others have.

    python tests/campaigns/run.py peers_parity --rounds 200

In each round, processes hold (`Holder`), and others send the logs of ranks (`LogSender`), which grow. Hosts are
killed with both, in the middle of it or when all is held; holders are killed alone, and started again; a bit is
flipped in the memory of a holder. Then the chain is read from the holders that are left: all that they give must be
what the logs have, up to a step that all ranks have, and it may be an error only if no start was whole.
Rounds of `peers_saves` send saves instead of logs.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from ckpt.holding.holder import HeldPieces, Holder
from ckpt.holding.log_sender import LogSender
from ckpt.holding.peers import Peers
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import read_range
from ckpt_formats.parity.scheme import PeerScheme
from ckpt_formats.stores import parity_requests, piece_requests
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.parity_requests import HeldParity
from ckpt_formats.stores.peers_store import PeersStore, open_peers
from ckpt_formats.stores.piece_requests import HeldRun
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.layout import RankLayout
from ckpt_formats.universal.gradients.record import Kind
from ckpt_formats.universal.gradients.segment import rank_file
from forking import forking

if TYPE_CHECKING:
    from run import Round

RANKS = 6
STEPS = 5
START = 4_000_000
"""The most bytes of the start of a log: some pieces."""
SECONDS = 300.0
Sending = Callable[[Path, Mapping[str, Any], int, int], None]
SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"


def rounds(folder: Path, seed: int) -> Generator[Round, None, None]:
    """Rounds without end."""
    import peers_saves
    from run import Round

    logs, saves = Logs.create(folder, seed), peers_saves.Saves.create(folder, seed)
    forking("peers_parity", "peers_saves")
    for number in range(1 << 30):
        way = ("running", "flipped", "restarted", "saves", "settled", "saves, flipped")[number % 6]
        work, own_seed = folder / f"round-{number}", seed * 1_000_003 + number
        if way.startswith("saves"):
            yield Round(way, partial(peers_saves.one_round, saves, work, own_seed, way))
        else:
            yield Round(way, partial(one_round, logs, work, own_seed, way))


@dataclass(frozen=True)
class Logs:
    """The chain of a run, whose ranks have logs of random bytes: what holds and sends them does not read them."""

    chain: Path
    ends: tuple[tuple[int, ...], ...]
    """Of each rank, where each record ends; that of the state at the start is the first."""

    @classmethod
    def create(cls, folder: Path, seed: int, ranks: int = RANKS) -> Logs:
        """Write a layout, logs, and the list of the chain."""
        draw, sample = random.Random(seed), SAMPLES / "recorded-2" / "run.chain"
        chain = folder / "run.chain"
        line = chain_file.load(sample / chain_file.NAME).segments[0]
        layout = layouts.load(sample / line.folder / layouts.NAME)
        others = [RankLayout((), ())] * (ranks - len(layout.ranks))
        segment = chain / line.folder
        segment.mkdir(parents=True)
        (segment / layouts.NAME).write_bytes(layouts.dump(replace(layout, ranks=(*layout.ranks, *others))))
        ends = []
        for rank in range(ranks):
            sizes = [draw.randrange(START * 4 // 5, START), *(draw.randrange(1000, 400_000) for _ in range(STEPS))]
            ends.append(tuple(accumulate(sizes)))
            (segment / rank_file(rank)).write_bytes(draw.randbytes(sum(sizes)))
        (chain / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex((), (replace(line, step=None),))))
        return cls(chain, tuple(ends))

    @property
    def segment(self) -> Path:
        """The folder of the logs."""
        return next(one.parent for one in self.chain.glob("*/layout.json"))

    def advance(self, sender: LogSender, rank: int, step: int) -> None:
        """Let the log of a rank grow to the end of a step."""
        if not step:
            sender.advance(self.ends[rank][0], Kind.FINGERPRINT, 0)
        else:
            sender.advance(self.ends[rank][step], Kind.GRADIENTS, step)

    def compare(self, path: Path) -> int:
        """Compare all that the memory of peers has with the logs. Returns the last step of all ranks."""
        known = chain_file.load(path / chain_file.NAME)
        assert [one.run for one in known.segments] == [layouts.load(self.segment / layouts.NAME).run]
        assert read_all(path / self.segment.name / layouts.NAME) == (self.segment / layouts.NAME).read_bytes()
        steps = []
        for rank, ends in enumerate(self.ends):
            content = read_all(path / self.segment.name / rank_file(rank))
            assert content == (self.segment / rank_file(rank)).read_bytes()[: len(content)], f"rank {rank} differs"
            steps.append(bisect_right(ends, len(content)) - 1)
        assert isinstance(path.store, PeersStore)
        assert path.store.step == min(steps), f"{path.store.step}, not {min(steps)}"
        return min(steps)


def read_all(path: Path) -> bytes:
    """All bytes of a file, wherever it is."""
    return bytes(read_range(path, 0, path.stat().st_size))


def one_round(logs: Logs, work: Path, seed: int, way: str) -> Mapping[str, int]:
    """One round. Returns what was seen."""
    draw = random.Random(seed)
    work.mkdir()
    hosts = Hosts.drawn(draw, work, partial(send, logs))
    count, text, seen = len(hosts.addresses), f"seed {seed}: {way}, {hosts}", {str(way): 1}
    try:
        if way == "running":
            if draw.random() < 0.7:
                hosts.wait_for_start()
            time.sleep(draw.uniform(0.0, 0.6))
            was_whole = (work / "whole").exists()
        else:
            if way == "restarted":
                time.sleep(draw.uniform(0.0, 0.6))
                hosts.restart(draw.randrange(count))
            deadline = time.monotonic() + SECONDS
            while not are_filled(logs, hosts.peers):
                assert time.monotonic() < deadline, "not all is held"
                time.sleep(0.1)
            was_whole = True
        lost = hosts.lose(draw, hosts.peers.parsed.spares - (way == "flipped"))
        flipped = draw.choice([one for one in range(count) if one not in lost])
        if way == "flipped":
            hosts.flip(flipped)
        try:
            path = open_peers(hosts.url(lost))
            assert isinstance(path.store, PeersStore)
            step = logs.compare(path)
        except CkptError as error:
            if was_whole:
                raise AssertionError(f"{text}: without {lost}") from error
            return {**seen, "no start": 1}
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

    def __init__(self, work: Path, scheme: str, jump: int, count: int, seed: int, sending: Sending) -> None:
        """`sending`: sends what the ranks of a host have, until it is killed."""
        self._work = work
        self._processes: dict[tuple[str, int], Any] = {}
        self._context = get_context("forkserver")
        self.addresses = [f"127.0.0.1:{_free_port()}" for _ in range(count)]
        for host in range(count):
            self._start("hold", host, hold, (self.addresses[host], seed + host))
        fields = {"hosts": self.addresses, "scheme": scheme, "jump": jump, "run": "run.chain"}
        self.peers = Peers(**fields)
        for host in range(count):
            self._start("send", host, sending, (work, fields, host, seed))

    @classmethod
    def drawn(cls, draw: random.Random, work: Path, sending: Sending) -> Hosts:
        """Hosts with any scheme that so many can have."""
        count = draw.choice([3, 6, 6, 7])
        schemes = [(k, m) for k in range(2, count) for m in range(1, min(count - k, 3) + 1)]
        scheme = PeerScheme(*draw.choice(schemes))
        return cls(work, str(scheme), draw.randint(1, count // scheme.hosts), count, draw.getrandbits(32), sending)

    def __str__(self) -> str:
        return f"{self.peers.parsed}, {len(self.addresses)} hosts, jump {self.peers.jump}"

    def _start(self, what: str, host: int, function: Any, arguments: tuple[object, ...]) -> None:
        process = self._context.Process(target=function, args=arguments, daemon=True)
        process.start()
        self._processes[what, host] = process

    def lose(self, draw: random.Random, limit: int) -> list[int]:
        """Kill up to so many hosts of each group. Returns which."""
        groups = [
            draw.sample(list(group), draw.choice([limit, draw.randint(0, limit)]))
            for group in self.peers.parsed.groups(len(self.addresses), self.peers.jump)
        ]
        lost = sorted(host for group in groups for host in group)
        self.kill(lost)
        return lost

    def url(self, lost: list[int]) -> str:
        """The address of the run at the hosts that are left."""
        left = [address for host, address in enumerate(self.addresses) if host not in lost]
        return f"peers://{','.join(left)}/run.chain"

    def wait_for_start(self) -> None:
        """Wait until the start of all ranks is held, as rank 0 says."""
        deadline = time.monotonic() + SECONDS
        while not (self._work / "whole").exists():
            assert time.monotonic() < deadline, "no start is held"
            time.sleep(0.01)

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


def are_filled(logs: Logs, peers: Peers) -> bool:
    """Whether all holders have all of the logs, as they say themselves."""
    with suppress(CkptError):
        answers = [_ask(address) for address in peers.addresses]
        for rank in range(RANKS):
            name = f"{logs.segment.name}/{rank_file(rank)}"
            size = logs.ends[rank][-1]
            host, lane = peers.host_of(rank, RANKS), peers.lane_of(rank, RANKS)
            files = [files for files in answers[host][0].values() if name in files]
            if not files or files[0][name].nbytes < size:
                return False
            added = Counter[int]()
            for one in peers.sets_of(host):
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
        spares = peers.parities_of(0)[: peers.parsed.spares]
        return all(any(chain_file.NAME in files for files in answers[host][0].values()) for host in (0, *spares))
    return False


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
        there = [own for own in (held, sums) if own]
        if not there:  # a host of no rank may have no parity either
            return
        parts = draw.choice(there)
        part = draw.choice(parts)
        limit = len(part) if parts is held else min(len(part), 1 << 18)
        part[draw.randrange(limit)] ^= 1 << draw.randrange(8)

    signal.signal(signal.SIGUSR1, flip)
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            Holder(pieces, NetworkAddress(host, int(port)))
            break
        except CkptError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    Event().wait()


def send(logs: Logs, work: Path, fields: Mapping[str, Any], host: int, seed: int) -> None:
    """Send the logs of a host's ranks, which grow from step to step."""
    peers, draw = Peers(**fields), random.Random(seed + host)
    ranks = [rank for rank in range(RANKS) if peers.host_of(rank, RANKS) == host]
    senders = {rank: LogSender(peers, logs.segment, rank, lambda address, text: None) for rank in ranks}
    for step in range(STEPS + 1):
        for rank, sender in senders.items():
            logs.advance(sender, rank, step)
            time.sleep(draw.uniform(0, 0.1))
    whole = work / "whole"
    while True:
        if 0 in senders and not whole.exists() and senders[0].is_whole:
            whole.touch()
        time.sleep(0.02)


def _ask(address: NetworkAddress) -> tuple[HeldRun, tuple[HeldParity, ...]]:
    with closing(Connection(address, Credentials(), "holder", 5.0)) as one:
        return piece_requests.list_run(one, "run.chain"), parity_requests.list_parities(one, "run.chain")


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])
