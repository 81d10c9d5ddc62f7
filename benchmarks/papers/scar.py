"""SCAR (Qiao et al., ICML 2019, arXiv 1810.07354): what a loss of blocks costs, by how they were saved and recovered.

Small models learn to predict the next byte of Python's library with plain SGD. A block is a row of a weight, or a value
of a bias. At a random iteration a share of all blocks is lost. They come from a running checkpoint, saved with one
budget in several ways: all of it every C iterations, or every r * C iterations the fraction r: in turn, at random, or
the blocks that are farthest from their saved values. Counted are the norm of the perturbation and the iteration cost:
how many more iterations it takes to the least loss of the undisturbed run. Needs torch.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt.partial.changes import BlockChange, within_budget

Array = np.ndarray[Any, Any]
Blocks = dict[str, Array]
"""Parameters by name: each row is a block."""

EVERY, FRACTION = 16, 1 / 8
END, MOST = 160, 800
FIRST, LAST = 40, 120
"""Iterations between which failures are."""
CONTEXT, BATCH, KEPT = 4, 256, 2048
TEXT = 1_000_000
NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "MLR": (lambda: nn.EmbeddingBag(256 * CONTEXT, 256, mode="sum"), 5.0),
    "MLP": (
        lambda: nn.Sequential(
            *(nn.Embedding(256 * CONTEXT, 16), nn.Flatten()),
            *(nn.Linear(16 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, 256)),
        ),
        0.5,
    ),
}
"""Multinomial logistic regression on the last four bytes, and a network with a hidden layer: with their rates."""


@dataclass(frozen=True)
class Strategy:
    name: str
    select: Callable[[Blocks, Blocks, int, np.random.Generator], dict[str, Array]] | None
    """Which rows to save, as masks; None: all of them every C iterations."""
    partial: bool = True
    """Recover lost blocks alone, not everything."""


@dataclass(frozen=True)
class Cost:
    perturbation: float
    """Its norm, relative to that of a set-back of everything to the last full checkpoint."""
    iterations: float


def rows_of(state: Blocks) -> list[tuple[str, int, int]]:
    return [(name, row, values[row].nbytes) for name, values in state.items() for row in range(len(values))]


def masks(state: Blocks, chosen: Iterator[tuple[str, int]]) -> dict[str, Array]:
    selected = {name: np.zeros(len(values), bool) for name, values in state.items()}
    for name, row in chosen:
        selected[name][row] = True
    return selected


def in_turn(saved: Blocks, now: Blocks, turn: int, random: np.random.Generator) -> dict[str, Array]:
    rows, share = rows_of(now), int(1 / FRACTION)
    return masks(now, ((name, row) for i, (name, row, _) in enumerate(rows) if i % share == turn % share))


def at_random(saved: Blocks, now: Blocks, turn: int, random: np.random.Generator) -> dict[str, Array]:
    rows = rows_of(now)
    chosen = random.permutation(len(rows))[: max(1, round(FRACTION * len(rows)))]
    return masks(now, (rows[i][:2] for i in chosen))


def by_distance(saved: Blocks, now: Blocks, turn: int, random: np.random.Generator) -> dict[str, Array]:
    changes = [
        BlockChange(f"{name}|{row}", (), float(np.linalg.norm(now[name][row] - saved[name][row])), nbytes)
        for name, row, nbytes in rows_of(now)
    ]
    chosen = within_budget(sorted(changes, key=lambda one: -one.distance), FRACTION)
    pairs = (one.name.split("|") for one in chosen)
    return masks(now, ((name, int(row)) for name, row in pairs))


STRATEGIES = (
    Strategy("all back to the last checkpoint", None, partial=False),
    Strategy("partial recovery, full checkpoints", None),
    Strategy("partial recovery, 1/8 in turn", in_turn),
    Strategy("partial recovery, 1/8 at random", at_random),
    Strategy("partial recovery, 1/8 by distance", by_distance),
)


class ByteRun:
    """A model that learns the next byte; the batch of a step depends on the number of the step alone."""

    def __init__(self, network: str) -> None:
        torch.manual_seed(1)
        make, rate = NETWORKS[network]
        self.model = make()
        if isinstance(self.model, nn.EmbeddingBag):
            nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:TEXT]
        self.text = np.frombuffer(text, np.uint8).astype(np.int64)
        self.kept = self.batch(0, KEPT)

    def batch(self, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each of so many places, the bytes before, numbered apart by their distance, and the byte."""
        places = np.random.default_rng(step).integers(CONTEXT, self.text.size, size)
        before = np.stack([self.text[places - back - 1] + 256 * back for back in range(CONTEXT)], axis=1)
        return torch.from_numpy(before), torch.from_numpy(self.text[places])

    def train(self, first: int, last: int) -> None:
        for step in range(first + 1, last + 1):
            before, wanted = self.batch(step, BATCH)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(before), wanted).backward()
            self.optimizer.step()

    @torch.no_grad()
    def loss(self) -> float:
        return float(nn.functional.cross_entropy(self.model(self.kept[0]), self.kept[1]))


class ScarRun:
    """One network; its undisturbed trajectory is kept."""

    def __init__(self, network: str) -> None:
        self.run = ByteRun(network)
        self.states, losses = [self.state()], [self.loss()]
        for step in range(END):
            self.run.train(step, step + 1)
            self.states.append(self.state())
            losses.append(self.loss())
        self.target, self.reached = min(losses), int(np.argmin(losses))

    def state(self) -> Blocks:
        return {name: p.detach().numpy().copy().reshape(len(p), -1) for name, p in self.run.model.named_parameters()}

    def loss(self) -> float:
        return self.run.loss()

    def saved(self, strategy: Strategy, failure: int, random: np.random.Generator) -> Blocks:
        """The running checkpoint right before the failure."""
        saved = {name: values.copy() for name, values in self.states[0].items()}
        if strategy.select is None:
            return self.states[failure // EVERY * EVERY]
        each = int(FRACTION * EVERY)
        for turn, step in enumerate(range(each, failure + 1, each)):
            for name, mask in strategy.select(saved, self.states[step], turn, random).items():
                saved[name][mask] = self.states[step][name][mask]
        return saved

    def cost(self, strategy: Strategy, failure: int, share: float, seed: int) -> Cost:
        now, random = self.states[failure], np.random.default_rng([seed, failure])
        rows = rows_of(now)
        lost = masks(now, (rows[i][:2] for i in random.permutation(len(rows))[: round(share * len(rows))]))
        saved = self.saved(strategy, failure, random)
        after = {name: values.copy() for name, values in now.items()}
        for name, values in after.items():
            rows_back = lost[name] if strategy.partial else slice(None)
            values[rows_back] = saved[name][rows_back]
        back = self.states[failure // EVERY * EVERY]
        size = distance(after, now) / distance(back, now)
        with torch.no_grad():
            for name, p in self.run.model.named_parameters():
                p.copy_(torch.from_numpy(after[name]).reshape(p.shape))
        step = failure
        while self.loss() > self.target and step < MOST:
            self.run.train(step, step + 1)
            step += 1
        return Cost(size, step - self.reached)


def distance(first: Blocks, second: Blocks) -> float:
    return float(np.sqrt(sum(float(((first[n] - second[n]).astype(np.float64) ** 2).sum()) for n in first)))


def measure(network: str, share: float, failures: int) -> Iterator[tuple[str, Cost]]:
    """The mean cost of each strategy, over the same failures."""
    run = ScarRun(network)
    times = np.random.default_rng(1).integers(FIRST, LAST, failures)
    times = times + (times % EVERY == 0)  # not right at a full checkpoint
    for strategy in STRATEGIES:
        costs = [run.cost(strategy, int(time), share, seed) for seed, time in enumerate(times)]
        yield (
            strategy.name,
            Cost(*(float(np.mean([getattr(c, field) for c in costs])) for field in ("perturbation", "iterations"))),
        )
