"""Kill trainers and shadows again and again; each run goes on from what a shadow has.

Two ranks train with DDP and are recorded. After a few steps they are killed (SIGKILL): both, one of them, or both with
the processes that write their log. One shadow follows the files, one a server of the log over a socket; they, and the
server, are killed at random moments, too, and started again. Then the state of each shadow must have the hash of a run
of which nothing was killed, at the last step that the log has, and the ranks go on from the state of one of them. So
an error would stay in all that follows.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first step of an optimizer would import in each run
from torch import distributed, nn

from ckpt.shadow.client import ShadowConnection
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.tensor import read
from ckpt_formats.stores.address import NetworkAddress, parse_address
from ckpt_recorder import Recorder
from recording_kills import Net, Progress, _arrays, _lives, _restored, forked, hash_of, last_of, waited
from recording_kills import await_ended as await_writers
from recording_kills import children as children_of
from run import Round, counted

SECONDS = 120
ROUNDS = 50
"""Rounds of one run; then another run begins."""
FEW, MANY = 1, 7
"""The steps before a kill."""
PAUSE = 0.03
"""Seconds after each step."""


def train(
    rank: int, place: Path, run: Path | None, steps: int, address: NetworkAddress | None, progress: Progress
) -> None:
    """One rank. Without a chain it is the run of which nothing is killed, and writes its hashes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{place}/meet", rank=rank, world_size=2)
    torch.manual_seed(1)
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(10 + rank)
    step = 0
    if address is not None:
        with ShadowConnection(address) as shadow:
            step = load(shadow.checkpoint, net, optimizer, rank)
    recorder = (
        None if run is None else Recorder(net, optimizer, run, step=step, flush=3, fingerprint=7, retry=50, slots=2)
    )
    if recorder is not None:
        progress.say(rank, 2, recorder.writer_pid or 0)
    hashes = []
    progress.say(rank, 0, 1)
    while step < steps:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step % 9)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(6, 24)), torch.randint(5, (6,))).backward()
        optimizer.step()
        step += 1
        if recorder is not None:
            recorder.note(seen=step * 6)
            time.sleep(PAUSE)
        else:
            hashes.append(hash_of(_arrays(net, optimizer)))
        progress.say(rank, 1, step)
    if recorder is not None:
        recorder.close()
    elif rank == 0:
        (place / "hashes.json").write_text(json.dumps(hashes))


def load(checkpoint: Checkpoint, net: Net, optimizer: torch.optim.Optimizer, rank: int) -> int:
    """Take the state of a shadow. Returns its step."""
    values = {name: torch.from_numpy(read(p.weight).copy()) for name, p in checkpoint.parameters.items()}
    net.load_state_dict({name: values[name] for name in net.state_dict()})
    for name, tensor in net.named_parameters():
        held = checkpoint.parameters[name]
        if "exp_avg" in held.states:
            state = optimizer.state[tensor]
            state["step"] = torch.tensor(float(held.values["step"]))  # type: ignore[arg-type]
            for one in ("exp_avg", "exp_avg_sq"):
                state[one] = torch.from_numpy(read(held.states[one]).copy())
    states: Any = checkpoint.extras.get("random_states")
    if states:
        torch.set_rng_state(torch.from_numpy(states[f"rank-{rank:05d}"]["torch"].copy()))
    assert checkpoint.step is not None
    return checkpoint.step


@dataclass
class Process:
    """A command that is started again after it was killed."""

    arguments: list[str]
    output: Path
    process: subprocess.Popen[bytes] | None = None
    address: str = ""

    def start(self) -> None:
        """Start it. It listens where it did before."""
        if self.address:
            self.arguments[self.arguments.index("--listen") + 1] = self.address.partition("//")[2].partition("/")[0]
        with self.output.open("wb") as output:
            command = [sys.executable, "-m", "ckpt_cli", *self.arguments, "--json"]
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def await_address(self) -> None:
        """Wait until it listens."""
        assert self.process is not None
        deadline = time.monotonic() + SECONDS
        while b"\n" not in self.output.read_bytes():
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            assert time.monotonic() < deadline, "it does not listen"
            time.sleep(0.01)
        self.address = json.loads(self.output.read_text().splitlines()[0])["address"]

    def kill(self) -> None:
        assert self.process is not None
        code = self.process.poll()
        assert code is None, self.output.read_text()[-3000:]
        self.process.kill()
        self.process.wait()


class Campaign:
    """A run that is killed again and again, and all that follows it."""

    def __init__(self, place: Path, draw: random.Random) -> None:
        self.place, self.run, self.draw = place, place / "run.chain", draw
        self.steps = ROUNDS * 20 + 500
        self.counts = Counter[str]()
        self.address: NetworkAddress | None = None
        self.is_broken = False
        truth = place / "truth"
        truth.mkdir()
        ranks = [self._fork(rank, truth, None, None, Progress()) for rank in range(2)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        assert codes == [0, 0], (truth / "said").read_text()
        self.truth: list[str] = json.loads((truth / "hashes.json").read_text())
        self.processes: dict[str, Process] = {}

    def _fork(
        self, rank: int, place: Path, run: Path | None, address: NetworkAddress | None, progress: Progress
    ) -> int:
        return forked(lambda: train(rank, place, run, self.steps, address, progress), place / "said")

    def start_followers(self) -> None:
        files = Process(["shadow", str(self.run), "--listen", "0", "--workers", "1"], self.place / "files.said")
        server = Process(["serve", str(self.run), "--listen", "0"], self.place / "server.said")
        server.start()
        server.await_address()
        mirror = ["--mirror", str(self.place / "mirror")]
        command = ["shadow", server.address, "--listen", "0", "--workers", "1", *mirror]
        socket = Process(command, self.place / "socket.said")
        for one in (files, socket):
            one.start()
            one.await_address()
        self.processes = {"shadow of files": files, "server": server, "shadow of a socket": socket}

    def round(self) -> None:
        """Train, kill, compare, and choose the shadow from which the run goes on."""
        self.is_broken = True  # unless this round comes to its end
        place = Path(tempfile.mkdtemp(dir=self.place))
        progress = Progress()
        first = last_of(self.run) or 0
        ranks = [self._fork(rank, place, self.run, self.address, progress) for rank in range(2)]
        wanted = first + self.draw.randrange(FEW, MANY)
        try:
            self._wait(lambda: progress.phase() == 1 and min(progress.done()) >= wanted)
        except AssertionError as error:
            raise AssertionError(f"{error}: {(place / 'said').read_text()[-3000:]}") from None
        if not self.processes:
            self.start_followers()
        for name, process in self.processes.items():
            if self.draw.random() < 0.5:
                process.kill()
                self.counts[f"kills: {name}"] += 1
                if name == "shadow of a socket":  # one that begins must find the server
                    self.processes["server"].await_address()
                process.start()
        time.sleep(self.draw.random() * 0.02)
        writers = [*progress.writers(), *children_of(ranks)]
        with_writers = self.draw.random() < 0.3
        victims = [*ranks, *(writers if with_writers else ())]
        if self.draw.random() < 0.3 and not with_writers:
            victims = [self.draw.choice(ranks)]  # the other one ends with an error
        for pid in self.draw.sample(victims, len(victims)):
            if pid in ranks or _lives(pid):
                os.kill(pid, signal.SIGKILL)
        self.counts["kills: trainers"] += 1
        self.counts["kills: writers too"] += with_writers
        waited(ranks)
        await_writers(writers, self.run)
        last = last_of(self.run)
        assert last is not None
        done = min(progress.done())
        assert with_writers or done <= last <= done + 1, f"{last} is the last step of the log; {done} were done"
        self.counts["a step ahead of the trainer"] += last > done
        for process in self.processes.values():
            process.await_address()
        listening = [parse_address(self.processes[name].address) for name in self.processes if name != "server"]
        for one in listening:
            self._compare(one, last)
        self.address, self.is_broken = self.draw.choice(listening), False

    def close(self) -> None:
        """End all processes that follow the run."""
        for process in self.processes.values():
            if process.process is not None:
                process.process.kill()
                process.process.wait()

    def _compare(self, address: NetworkAddress, last: int) -> None:
        """The shadow must reach the last step, and have the state of the run of which nothing was killed."""
        actual: object = None

        def reached() -> bool:
            nonlocal actual
            try:
                with ShadowConnection(address) as shadow:
                    actual = shadow.checkpoint.step
                    if actual == last and last > 0:
                        assert hash_of(_restored(shadow.checkpoint)) == self.truth[last - 1], last
                    return actual == last
            except CkptError as error:
                actual = error
            return False

        try:
            self._wait(reached)
        except AssertionError as error:
            output = "".join(one.output.read_text()[-2000:] for one in self.processes.values())
            raise AssertionError(f"{error}: {address} has {actual}, the log {last}\n{output}") from None
        self.counts["states compared, same bits"] += 1

    def _wait(self, done: Any) -> None:
        deadline = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < deadline, "too slow"
            time.sleep(0.003)


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    draw = random.Random(seed)
    while True:
        campaign = Campaign(Path(tempfile.mkdtemp(dir=folder)), draw)
        try:
            for _ in range(ROUNDS):
                yield Round("run", counted(campaign.counts, campaign.round))
                if campaign.is_broken:
                    break
        finally:
            campaign.close()
