"""SCAR (Qiao et al., ICML 2019, arXiv 1810.07354): what a loss of blocks costs, by how they were saved and recovered.

Small networks learn scikit-learn's digits with plain SGD. A block is a row of a weight, or a bias. At a random
iteration a share of all blocks is lost. They come from a running checkpoint, saved with one budget in several ways:
all of it every C iterations, or every r * C iterations the fraction r: in turn, at random, or the blocks that are
farthest from their saved values. Counted are the norm of the perturbation and the iteration cost: how many more
iterations it takes to the loss that the undisturbed run has at its end. Needs torch and scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lossy_runs
import numpy as np
import torch
from torch import nn

from ckpt.combine.block_changes import BlockChange, within_budget

Array = np.ndarray[Any, Any]
Blocks = dict[str, Array]
"""Parameters by name: each row is a block."""

EVERY, FRACTION = 16, 1 / 8
END, MOST = 160, 800
FIRST, LAST = 40, 120
"""Iterations between which failures are."""
lossy_runs.NETWORKS.setdefault("MLR", (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 0.1))


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
    made = {name: np.zeros(len(values), bool) for name, values in state.items()}
    for name, row in chosen:
        made[name][row] = True
    return made


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


class ScarRun:
    """One network; its undisturbed trajectory is kept."""

    def __init__(self, network: str) -> None:
        self.run = lossy_runs.Digits(network)
        self.states = [self.state()]
        for step in range(END):
            self.run.train(step, step + 1)
            self.states.append(self.state())
        self.target = self.loss()

    def state(self) -> Blocks:
        return {name: p.detach().numpy().copy().reshape(len(p), -1) for name, p in self.run.model.named_parameters()}

    @torch.no_grad()
    def loss(self) -> float:
        kept = self.run.kept
        images, labels = self.run.images[:kept], self.run.labels[:kept]
        return float(nn.functional.cross_entropy(self.run.model(images), labels))

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
        return Cost(size, step - END)


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
