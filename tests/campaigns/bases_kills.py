"""kill -9 while bases are copied and folded: does the chain stay readable, with the bits of the run in every state?

A run of two ranks that nobody records or kills notes a hash of its whole state after each step. Each round kills the
trainers, the processes that make bases, those that write the log, or all of them, at a random moment. Afterwards each
base, and the last step, must have the hash of its step. A recorder that then begins in the chain removes what is left.
torch is imported once; every run is a fork of this process, which itself must not compute with torch. What a recorder
starts is a fork, too.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file, folder, states
from ckpt_formats.universal.chain.members import open_member
from ckpt_recorder import Bases, Recorder
from forked_writers import fork_writers
from recording_kills import SECONDS, Progress, _arrays, _lives, _restored, await_ended, forked, hash_of, waited
from run import Round, alternated

STEPS, WIDTH = 80, 260
BASES = {"rolling": Bases(every=4, spread=3), "at once": Bases(every=4, spread=1)}
VICTIMS = ("trainers", "one trainer", "bases", "one base", "writers and bases", "everything")


class Net(nn.Module):
    """Of several chunks, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.BatchNorm1d(WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(values)
        return result


def train(rank: int, work: Path, base: str | None, progress: Progress) -> None:
    """One rank; without `base` it is not recorded, and writes its hashes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{work}/meet", rank=rank, world_size=2)
    torch.manual_seed(1)
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    stepping = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(10 + rank)
    hashes, recorder = [], None
    if base is not None:
        recorder = Recorder(net, stepping, work / "run.chain", step=0, flush=3, retry=20, **options(base))
    for step in range(STEPS):
        stepping.zero_grad()
        model(torch.randn(6, WIDTH)).square().mean().backward()
        stepping.step()
        progress.say(rank, 1, step + 1)
        if recorder is None:
            hashes.append(hash_of(_arrays(net, stepping)))
            continue
        progress.say(rank, 2, recorder.writer_pid or 0)
        progress.say(
            rank, 3, (recorder._run.bases and recorder._run.bases.process and recorder._run.bases.process.pid) or 0
        )
        time.sleep(0.02)
    if recorder is not None:
        recorder.close()
    else:
        (work / f"hashes-{rank}.json").write_text(json.dumps(hashes))


def options(base: str) -> dict[str, Any]:
    return {"bases": BASES[base], "random_states": False, "fingerprint": 50}


def one_round(root: Path, truth: list[str], base: str, victims: str, rng: random.Random) -> dict[str, int]:
    """Run, kill, compare. Raises AssertionError if anything is not as it must be."""
    work = Path(tempfile.mkdtemp(dir=root))
    run, progress = work / "run.chain", Progress()
    ranks = [forked(lambda r=rank: train(r, work, base, progress), work / "said") for rank in range(2)]
    bases = lambda: [pid for pid in map(int, progress._all[:, 3]) if pid]  # noqa: E731
    try:
        deadline = time.monotonic() + SECONDS
        while len(bases()) < 2:
            assert time.monotonic() < deadline, "the run hangs"
            time.sleep(0.005)
        time.sleep(rng.uniform(0.1, 1.5))
        sent, is_making = min(progress.done()), bool(list(run.glob("pieces-*")))
        killed = {
            "trainers": ranks,
            "one trainer": [rng.choice(ranks)],
            "bases": bases(),
            "one base": [rng.choice(bases())],
            "writers and bases": [*progress.writers(), *bases()],
            "everything": [*ranks, *progress.writers(), *bases()],
        }[victims]
        for pid in rng.sample(killed, len(killed)):
            if pid in ranks or _lives(pid):
                os.kill(pid, signal.SIGKILL)
        codes = waited(ranks)
        await_ended([*progress.writers(), *bases()], run)
        if "trainer" not in victims and victims != "everything":
            assert codes == [0, 0], f"training ended with {codes}"
        listed = chain_file.read(run)
        last = states.last_step(run, listed)
        if victims in ("trainers", "one trainer"):
            assert last >= min(progress.done()) >= sent, f"{last} is restorable; done were {progress.done()}"
        if victims in ("bases", "one base"):
            assert last == STEPS, f"{last} is the last step"
        for member in listed.members:
            assert hash_of(_restored(open_member(run, listed, member))) == truth[member.step - 1], member.step
        assert hash_of(_restored(states.open_state(run, listed, last))) == truth[last - 1], last
        again = forked(lambda: begin_again(run, last), work / "said")
        assert waited([again]) == [0]
        left = [
            one.name for one in folder.leftovers(run, chain_file.read(run)) if one.name.startswith(("pieces", "grad"))
        ]
        assert not left, left
    except BaseException as error:
        raise AssertionError(
            f"{base}, {victims}: {error!r} in {work}\n{(work / 'said').read_text()[-3000:]}"
        ) from error
    shutil.rmtree(work)
    return {"kills": 1, "bases, same bits": len(listed.members), "while one was copied": is_making}


def begin_again(run: Path, step: int) -> None:
    """The run of one rank goes on there, and its recorder begins and ends."""
    torch.set_num_threads(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    restored = states.open_state(run, chain_file.read(run), step)
    for name, parameter in net.named_parameters():
        values = {key: torch.from_numpy(read(one)) for key, one in restored.parameters[name].states.items()}
        parameter.data.copy_(values.pop("model"))
        optimizer.state[parameter] = {**values, "step": torch.tensor(float(step))}
    with Recorder(net, optimizer, run, step=step):
        pass


def rounds(root: Path, seed: int) -> Iterator[Round]:
    rng, progress = random.Random(seed), Progress()
    fork_writers()
    gc.freeze()  # the forks search none of it for garbage
    (root / "truth").mkdir()
    ranks = [forked(lambda r=rank: train(r, root / "truth", None, progress), root / "said") for rank in range(2)]
    assert waited(ranks) == [0, 0], (root / "said").read_text()
    truth = json.loads((root / "truth" / "hashes-0.json").read_text())
    runs = {
        f"{base}, {victims}": partial(one_round, root, truth, base, victims, rng)
        for victims in VICTIMS
        for base in BASES
    }
    yield from alternated(runs)
