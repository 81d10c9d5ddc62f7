"""Publish each step of real runs, and compare all bits at two followers.

The runs are those that `benchmarks/policy_runs.py` has recorded: GRPO and DPO of a small Llama, up to 1,000 steps. Two
ranks publish every step. Followers in this process update, yield changes that are written into arrays, or write into a
model's tensors; another process serves a folder. After each step, all bits of both are compared with the run. Where no
runs are recorded, and in the check, a small network is trained.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.following.follower import Follower
from ckpt.following.served import CURRENT, RECORD
from ckpt.publishing.publication import open_publication
from ckpt.publishing.published_objects import put_object
from ckpt.publishing.rank_buffers import RankBuffers
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.published.records import StepRecord
from published import model_of
from run import Round, alternated
from sync_kills import SECONDS, fill, read_safetensors, serve
from weight_runs import WeightRun, default_runs

RANKS = 2
Arrays = dict[str, np.ndarray[Any, Any]]


def train(folder: Path, steps: int) -> WeightRun:
    """Train a small network with AdamW on float32 masters, and record its bf16 weights."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def weights() -> np.ndarray[Any, Any]:
        flat = torch.cat([p.detach().bfloat16().flatten() for p in model.parameters()])
        return flat.view(torch.int16).numpy().view(np.uint16)

    before = weights()
    run = WeightRun.create(folder, {name: tuple(p.shape) for name, p in model.named_parameters()}, before)
    for step in range(1, steps + 1):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(0, 10, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after = weights()
        run.add(step, before, after)
        before = after
    return run


class InProcess:
    """Followers in this process, one for each way to use them."""

    def __init__(self, chain: Path, like: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self.updated, self.changed, self.applied = (Follower(chain) for _ in range(3))
        self.written, self.model = ({name: np.zeros_like(values) for name, values in like.items()} for _ in range(2))

    def update(self, way: str) -> tuple[int, Arrays]:
        """Return the step, and the arrays that have its weights."""
        if way == "updated":
            return self.updated.update().step, self.updated.tensors()
        if way == "applied":
            return self.applied.apply_to(self.model).step, self.model
        for change in self.changed.iter_changes():
            target = self.written[change.name]
            if change.indices is None:
                target[...] = change.values
            else:
                target.reshape(-1)[change.indices] = change.values
        return self.changed.confirm().step, self.written


@dataclass(frozen=True)
class ServedSteps:
    """A process that serves the last step in a folder."""

    target: Path
    process: Any

    def check(self, step: int, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Wait until a step is served, and compare all bits."""
        end = time.monotonic() + SECONDS
        while self.step() != step:
            assert time.monotonic() < end, f"step {step} is not served"
            assert self.process.is_alive(), "the follower has ended"
            time.sleep(0.005)
        weights = read_safetensors(self.target / CURRENT / "model.safetensors")
        assert weights.keys() == tensors.keys()
        for name, values in tensors.items():
            assert weights[name].tobytes() == values.tobytes(), f"served, step {step}: {name}"

    def step(self) -> int | None:
        try:
            data = (self.target / CURRENT / RECORD).read_bytes()
        except FileNotFoundError:
            return None
        return StepRecord.from_bytes(data, self.target).name.step


@contextmanager
def serving(chain: Path, target: Path) -> Iterator[ServedSteps]:
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(str(chain), target))
    process.start()
    try:
        yield ServedSteps(target, process)
    finally:
        process.kill()
        process.join()


def publish_all(run: WeightRun, folder: Path, generator: random.Random) -> Counter[str]:
    """Publish each step of a run, and compare the followers."""
    chain, seen = folder / f"{run.folder.name}.chain", Counter[str]()
    first = run.tensors(run.state(0))
    model = model_of(first, RANKS)
    ranks = [RankBuffers(model, rank) for rank in range(RANKS)]
    following = InProcess(chain, first)
    with serving(chain, folder / "served") as served, open_publication(target_path(str(chain)), model) as publication:
        fill(ranks, model, first)
        publication.start(0, [rank.state() for rank in ranks])
        for step, weights in run.states():
            fill(ranks, model, run.tensors(weights))
            parent = None if publication.needs_base() else publication.parent
            coded = [rank.encode(parent is None) for rank in ranks]
            for one in coded:
                put_object(publication.place, one.share.object, one.object)
            publication.commit(step, parent, [one.share for one in coded])
            for rank in ranks:
                rank.accept()
            seen["steps" if parent else "bases"] += 1
            way = generator.choice(("updated", "changes written", "applied"))
            at, arrays = following.update(way)
            assert at == step
            for name, values in run.tensors(weights).items():
                assert arrays[name].tobytes() == values.tobytes(), f"{way}, step {step}: {name}"
            seen[way] += 1
            served.check(step, run.tensors(weights))
            seen["served"] += 1
    return seen


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    """Yield the recorded runs, the longest first; or a small one."""
    generator = random.Random(seed)
    recorded = [path.parent for path in default_runs().glob("*/run.json")]
    runs = [WeightRun.open(path) for path in recorded] or [train(folder / "network", 12)]
    runs.sort(key=lambda run: -run.steps)

    def work(run: WeightRun) -> Counter[str]:
        below = folder / f"chain-{generator.getrandbits(32):08x}"
        below.mkdir()
        return publish_all(run, below, generator)

    yield from alternated({run.folder.name: partial(work, run) for run in runs})
