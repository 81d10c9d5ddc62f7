"""kill -9 while a live run is saved: is each published save whole, with the bits of its step, and does the run go on?

A run of two ranks of DDP that nobody saves or kills notes a hash of its whole state after each step. Each round kills
the trainers, the processes that write, or all of them, three times, at random moments. Afterwards each published save
must pass `verify` and have the hash of its step. A new run that loads the newest one must go on with the hashes of all
steps, and must leave nothing of the killed ones.

`Saver` saves into a chain and into a folder, there also in torch's format, `dcp.save` into a folder, by `CkptWriter`;
each also into a store, which is moto's server. torch is imported once; every run and each comparison is a fork of this
process, which itself must neither compute with torch nor reach the store.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckpt
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt_formats.engines.dcp.folder import METADATA
from ckpt_formats.stores.location import source_path
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file
from ckpt_training import CkptReader, CkptWriter, Saver, load
from object_stores import BUCKET, moto, reached
from recording_kills import SECONDS, Progress, _arrays, _lives, _restored, forked, hash_of, waited
from run import Round, alternated

STEPS, WIDTH, EVERY, KILLS = 40, 200, 2, 3
VICTIMS = ("trainers", "one trainer", "writers", "one writer", "everything")


@dataclass(frozen=True)
class Target:
    """Where a run is saved, and by what."""

    name: str
    is_stored: bool = False
    by_dcp: bool = False

    def __str__(self) -> str:
        return f"{'dcp.save, ' if self.by_dcp else ''}{'store, ' if self.is_stored else ''}{self.name}"

    @property
    def victims(self) -> tuple[str, ...]:
        return VICTIMS[:2] if self.by_dcp else VICTIMS

    def within(self, work: Path, folder: str = "first") -> str:
        """Its path or URL in a round."""
        place = f"s3://{BUCKET}/{work.name}" if self.is_stored else str(work)
        return f"{place}/{folder}/{self.name}"


TARGETS = [
    *(Target(name, is_stored) for is_stored in (False, True) for name in ("run.chain", "saves")),
    *(Target("saves", is_stored, by_dcp=True) for is_stored in (False, True)),
    *(Target("items", is_stored) for is_stored in (False, True)),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(values)
        return result


def train(
    rank: int,
    work: Path,
    path: str | None,
    progress: Progress,
    life: int = 0,
    source: str = "",
    by_dcp: bool = False,
) -> None:
    """One rank. It notes hashes of its steps; with a path, it is saved there; with `source`, it goes on from it.

    `life`: how often the run was started before.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{work / f'meet-{life}'}", rank=rank, world_size=2)
    torch.manual_seed(1)
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(10 + rank)
    hashes = {}
    step = 0 if not source else dcp_loaded(source, model, optimizer) if by_dcp else load(source, model, optimizer).step
    saver = None
    if path is not None and not by_dcp:
        policy = DeltaPolicy(base_every=5) if is_chain(path) else None
        form = ckpt.DCP() if path.endswith("items") else None
        options = {"format": form, "policy": policy, "protect": 1 if form is not None and "://" not in path else None}
        saver = Saver(model, optimizer, path, memory=1 << 18, stall_seconds=5.0, **options)
    assert step is not None
    while step < STEPS:
        optimizer.zero_grad()
        model(torch.randn(6, WIDTH)).square().mean().backward()
        optimizer.step()
        step += 1
        if life or path is None:
            hashes[step] = hash_of(_arrays(net, optimizer))
        if path is not None:
            if step % EVERY == 0 and saver is not None:
                saver.save(step)
            elif step % EVERY == 0:
                dcp.save(state_dict(model, optimizer), storage_writer=CkptWriter(f"{path}/step-{step:08d}", step=step))
            progress.say(rank, 2, (saver and saver.writer_pid) or 0)
            progress.say(rank, 1, step)
            time.sleep(0.01)
    if saver is not None:
        saver.close()
    (work / f"hashes-{rank}.json").write_text(json.dumps(hashes))


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a rank saves by `dcp.save`, with its random state under a name of its own."""
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optim": states, "random": {str(distributed.get_rank()): torch.get_rng_state()}}


def dcp_loaded(source: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what `dcp.save` has saved; the step."""
    state = state_dict(model, optimizer)
    reader = CkptReader(source)
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    torch.set_rng_state(state["random"][str(distributed.get_rank())])
    assert reader.loaded is not None
    assert reader.loaded.step is not None
    return reader.loaded.step


def one_round(root: Path, truth: dict[int, str], target: Target, victims: str, rng: random.Random) -> Counter[str]:
    """Run, kill, compare, go on; several times. Raises AssertionError if anything is not as it must be.

    A killed trainer ends its life, and the next life goes on from the newest save; writers are killed several times in
    one life, and the next save starts others. The last life is not killed.
    """
    work, seen, newest = Path(tempfile.mkdtemp(dir=root)), Counter[str](), 0
    moments = sorted(rng.sample(range(EVERY, STEPS), KILLS))
    lives = [*([moments] if "writer" in victims else [[moment] for moment in moments]), []]
    path = target.within(work)
    try:
        for life, kills in enumerate(lives):
            if life and not newest:  # a chain only grows, so a run that begins anew needs another one
                path = target.within(work, f"again-{life}")
            by_step = newest and (target.by_dcp or is_chain(path))
            source = source_of(path, newest) if by_step else path if newest else ""
            seen["kills"] += _lived(target, work, life, path, source, kills, victims, rng)
            steps, left = compared(target, path, truth, work, newest if kills else 0)
            newest = max([newest, *steps])
            seen.update({"saves, same bits": len(steps), "while one was written": bool(left)})
        assert newest == STEPS, newest
        assert not left, f"left: {left}"
        for rank in range(2):
            hashes = json.loads((work / f"hashes-{rank}.json").read_text())
            assert all(truth[int(step)] == digest for step, digest in hashes.items()), "the run goes on with other bits"
    except BaseException as error:
        raise AssertionError(
            f"{target}, {victims}: {error!r} in {work}\n{(work / 'output').read_text()[-3000:]}"
        ) from error
    shutil.rmtree(work)
    return seen


def _lived(
    target: Target, work: Path, life: int, path: str, source: str, kills: list[int], victims: str, rng: random.Random
) -> int:
    """Run two ranks to their end or until they are killed, at these steps. Returns the number of kills."""
    progress, count = Progress(), 0
    runs = [partial(train, rank, work, path, progress, life, source, target.by_dcp) for rank in range(2)]
    ranks, deadline = [forked(run, work / "output") for run in runs], time.monotonic() + SECONDS
    for moment in kills:
        while (len(progress.writers()) < 2 and not target.by_dcp) or min(progress.done()) < moment:
            assert time.monotonic() < deadline, "the run hangs"
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.05))
        writers = progress.writers()
        killed = {
            "trainers": ranks,
            "one trainer": [rng.choice(ranks)],
            "writers": writers,
            "one writer": writers and [rng.choice(writers)],
            "everything": [*ranks, *writers],
        }[victims]
        living = [pid for pid in rng.sample(killed, len(killed)) if pid in ranks or _lives(pid)]
        for pid in living:
            os.kill(pid, signal.SIGKILL)
        count += bool(living)
    codes = waited(ranks)
    while any(map(_lives, progress.writers())):
        assert time.monotonic() < deadline, "a writer does not end"
        time.sleep(0.003)
    assert (kills and "writer" not in victims) or codes == [0, 0], f"training ended with {codes}"
    return count


def compared(
    target: Target, path: str, truth: dict[int, str], work: Path, after: int = 0
) -> tuple[list[int], list[str]]:
    """The steps after `after` that were published, and what is there of unpublished ones.

    Each must have the hash of its step, and, with `after=0`, pass `verify`.
    """
    result = work / "compared.json"
    result.unlink(missing_ok=True)
    code = forked(
        lambda: result.write_text(json.dumps(_compared(target, path, truth, after))) and None, work / "output"
    )
    assert waited([code]) == [0], "a published save is not as it must be"
    steps, left = json.loads(result.read_text())
    return steps, left


def _compared(target: Target, path: str, truth: dict[int, str], after: int) -> tuple[list[int], list[str]]:
    folder = source_path(path)
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    left = [name for name in names if name.startswith(".step-")]
    if target.is_stored:
        left += [f"{name}/.ckpt" for name in names if name.startswith("step-") and (folder / name / ".ckpt").is_dir()]
    if is_chain(path):
        if chain_file.NAME not in names:
            return [], left
        assert after or verify_chain(folder, Execution(workers=1)).findings == ()
        steps = [member.step for member in chain_file.load(folder / chain_file.NAME).members]
    else:
        folders = [name for name in names if name.startswith("step-")]
        mark = METADATA if path.endswith("items") else manifest.NAME
        steps = sorted(int(name[5:]) for name in folders if (folder / name / mark).is_file())
    steps = [step for step in steps if step > after]
    opened = {step: ckpt.open(source_of(path, step)) for step in steps}
    for step, checkpoint in opened.items():
        assert after or is_chain(path) or ckpt.verify(checkpoint).ok
        assert hash_of(_restored(checkpoint)) == truth[step], step
    return steps, left


def source_of(path: str, step: int) -> str:
    """How a user names a save."""
    return f"{path}@{step}" if is_chain(path) else f"{path}/step-{step:08d}"


def is_chain(path: str) -> bool:
    return path.endswith(".chain")


def rounds(root: Path, seed: int) -> Iterator[Round]:
    rng, progress = random.Random(seed), Progress()
    (root / "truth").mkdir()
    ranks = [forked(partial(train, rank, root / "truth", None, progress), root / "output") for rank in range(2)]
    assert waited(ranks) == [0, 0], (root / "output").read_text()
    stated = json.loads((root / "truth" / "hashes-0.json").read_text())
    truth = {int(step): digest for step, digest in stated.items()}
    runs = {
        f"{target}, {victims}": partial(one_round, root, truth, target, victims, rng)
        for victims in VICTIMS
        for target in TARGETS
        if victims in target.victims
    }
    with moto() as server, reached(server):
        yield from alternated(runs)
