"""kill -9 while a live run is saved: is each published save whole, with the bits of its step, and does the run go on?

A run of two ranks of DDP that nobody saves or kills notes a hash of its whole state after each step. Each round kills
the trainers, the processes that write, or all of them, at a random moment. Afterwards each published save must pass
`verify` and have the hash of its step. A new run that loads the newest one must go on with the hashes of all steps, and
its Saver must leave nothing of the killed one.

torch is imported once; every run is a fork of this process, which itself must not compute with torch.
"""

from __future__ import annotations

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

import torch
from torch import distributed, nn

import ckpt
from ckpt.chains.verify import verify_chain
from ckpt.pipeline import Execution
from ckpt_formats.universal.chain import file as index
from ckpt_training import Saver, load
from recording_kills import SECONDS, Progress, _arrays, _lives, _restored, forked, hash_of, waited
from run import Round, alternated

STEPS, WIDTH, EVERY = 40, 200, 2
TARGETS = ("run.chain", "saves")
VICTIMS = ("trainers", "one trainer", "writers", "one writer", "everything")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(values)
        return result


def train(rank: int, work: Path, target: Path | None, progress: Progress, source: str | None = None) -> None:
    """One rank. It writes hashes of its steps; with `target`, it is saved; with `source`, it goes on from there."""
    torch.set_num_threads(1)
    meeting = work / f"meet-{'again' if source is not None else 'first'}"
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(1)
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(10 + rank)
    hashes = {}
    step = load(source, model, optimizer).step if source else 0
    saver = None if target is None else Saver(model, optimizer, target, memory=1 << 18, stall_seconds=5.0)
    assert step is not None
    while step < STEPS:
        optimizer.zero_grad()
        model(torch.randn(6, WIDTH)).square().mean().backward()
        optimizer.step()
        step += 1
        if source is not None or saver is None:
            hashes[step] = hash_of(_arrays(net, optimizer))
        if saver is not None:
            if step % EVERY == 0:
                saver.save(step)
            progress.say(rank, 2, saver.writer_pid or 0)
            progress.say(rank, 1, step)
            time.sleep(0.01 if source is None else 0)
    if saver is not None:
        saver.close()
    (work / f"hashes-{rank}.json").write_text(json.dumps(hashes))


def one_round(root: Path, truth: dict[int, str], name: str, victims: str, rng: random.Random) -> dict[str, int]:
    """Run, kill, compare, go on. Raises AssertionError if anything is not as it must be."""
    work = Path(tempfile.mkdtemp(dir=root))
    target, progress = work / name, Progress()
    ranks = [forked(lambda r=rank: train(r, work, target, progress), work / "output") for rank in range(2)]
    try:
        deadline = time.monotonic() + SECONDS
        moment = rng.randrange(EVERY, STEPS)
        while len(progress.writers()) < 2 or min(progress.done()) < moment:
            assert time.monotonic() < deadline, "the run hangs"
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.05))
        writers = progress.writers()
        killed = {
            "trainers": ranks,
            "one trainer": [rng.choice(ranks)],
            "writers": writers,
            "one writer": [rng.choice(writers)],
            "everything": [*ranks, *writers],
        }[victims]
        was_saving = bool(list(target.glob(".step-*")))
        for pid in rng.sample(killed, len(killed)):
            if pid in ranks or _lives(pid):
                os.kill(pid, signal.SIGKILL)
        codes = waited(ranks)
        while any(map(_lives, progress.writers())):
            assert time.monotonic() < deadline, "a writer does not end"
            time.sleep(0.003)
        assert "writer" not in victims or codes == [0, 0], f"training ended with {codes}"
        steps = compared(target, truth)
        source = "" if not steps else f"{target}@{steps[-1]}" if name.endswith(".chain") else str(target)
        # A chain only grows, so a run that begins anew needs another one.
        goes_on = target if steps else work / f"again-{name}"
        again = [forked(lambda r=r: train(r, work, goes_on, progress, source), work / "output") for r in range(2)]
        assert waited(again) == [0, 0]
        for rank in range(2):
            hashes = json.loads((work / f"hashes-{rank}.json").read_text())
            assert all(truth[int(step)] == digest for step, digest in hashes.items()), "the run goes on with other bits"
        after = compared(goes_on, truth)
        assert after[-1] == STEPS, after
        assert not list(goes_on.glob(".step-*")), "something is left"
    except BaseException as error:
        raise AssertionError(
            f"{name}, {victims}: {error!r} in {work}\n{(work / 'output').read_text()[-3000:]}"
        ) from error
    shutil.rmtree(work)
    return {"kills": 1, "saves, same bits": len(steps), "while one was written": was_saving}


def compared(target: Path, truth: dict[int, str]) -> list[int]:
    """The steps that were published; each must be whole, and have the hash of its step."""
    if target.suffix == ".chain":
        if not (target / index.NAME).is_file():
            return []
        assert verify_chain(target, Execution(workers=1)).findings == ()
        steps = [member.step for member in index.load(target / index.NAME).members]
        opened = {step: ckpt.open(f"{target}@{step}") for step in steps}
    else:
        paths = sorted(target.glob("step-*"))
        opened = {int(path.name[5:]): ckpt.open(path) for path in paths}
        assert all(ckpt.verify(one).ok for one in opened.values())
    for step, checkpoint in opened.items():
        assert hash_of(_restored(checkpoint)) == truth[step], step
    return list(opened)


def rounds(root: Path, seed: int) -> Iterator[Round]:
    rng, progress = random.Random(seed), Progress()
    (root / "truth").mkdir()
    ranks = [forked(lambda r=rank: train(r, root / "truth", None, progress), root / "output") for rank in range(2)]
    assert waited(ranks) == [0, 0], (root / "output").read_text()
    stated = json.loads((root / "truth" / "hashes-0.json").read_text())
    truth = {int(step): digest for step, digest in stated.items()}
    runs = {
        f"{name}, {victims}": partial(one_round, root, truth, name, victims, rng)
        for victims in VICTIMS
        for name in TARGETS
    }
    yield from alternated(runs)
