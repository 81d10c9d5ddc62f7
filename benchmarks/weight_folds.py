"""What plans of folds cost the publisher, and what they save a follower that is behind."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from weight_encodings import CHUNK

from ckpt_formats.universal.published.share import encode_chunk

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from weight_runs import BF16, Array, WeightRun

PLANS: Sequence[Mapping[int, int]] = (
    {4: 4, 16: 16, 64: 64},
    {4: 4, 8: 8, 16: 16, 32: 32, 64: 64},
    {2: 2, 4: 4, 8: 8, 16: 16, 32: 32, 64: 64},
    {4: 4, 16: 16, 48: 16},
    {4: 4, 16: 16, 48: 16, 64: 64},
    {4: 4, 8: 8, 16: 16, 48: 16, 64: 64},
    {8: 8, 56: 8},
    {4: 4, 60: 4},
)
"""As `ckpt.publishing.publication.FOLDS`: how many steps a fold joins, and after how many steps another one ends."""
LENGTHS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
PERIOD, LAST = 64, 256
_DIGEST_NBYTES = 20
"""Of a chunk in the head of an object: its size and its digest."""


@dataclass(frozen=True)
class PlanCost:
    """A plan. Bytes are relative to those of a step's delta."""

    plan: str
    uploaded: float
    """Bytes of folds for each step."""
    encoded: float
    """Folds for each step."""
    copies: int
    """States that a rank keeps, at most."""
    behind: dict[int, tuple[int, float, float]]
    """By how many steps a follower is behind: the most objects of a rank, and the most and the mean bytes relative to
    those of the steps between, wherever it is."""


def fold_sizes(run: WeightRun, first: int) -> dict[int, float]:
    """Bytes of one delta over so many steps, relative to that over one: means over a part of the run."""
    states = [weights.view(BF16) for _, weights in run.states()][: first + PERIOD + 1]
    sizes = {}
    for length in LENGTHS:
        begins = range(first, first + PERIOD - length + 1, min(length, 16))
        sizes[length] = mean(_delta_nbytes(states[at], states[at + length]) for at in begins)
    return {length: size / sizes[1] for length, size in sizes.items()}


def _delta_nbytes(before: Array, after: Array) -> int:
    """All weights as one tensor."""
    chunks = range(0, before.size, CHUNK)
    return sum(len(encode_chunk(before[i : i + CHUNK], after[i : i + CHUNK])) + _DIGEST_NBYTES for i in chunks)


def cost(plan: Mapping[int, int], sizes: Mapping[int, float], behind: Sequence[int]) -> PlanCost:
    """What a plan costs in the last `PERIOD` of `LAST` steps after a base."""

    def nbytes(length: int) -> float:
        return float(np.interp(length, list(sizes), list(sizes.values())))

    folds = [(end - n, end) for n, every in plan.items() for end in range(every, LAST + n, every) if end >= n]
    recent = [(first, end) for first, end in folds if LAST - PERIOD < end <= LAST]
    steps = range(LAST - PERIOD + 1, LAST + 1)
    begins = defaultdict[int, list[int]](list)
    for first, end in folds:
        begins[end].append(first)

    def route(have: int, at: int) -> list[int]:
        """The steps that each object joins: as `find_route` finds them."""
        lengths = []
        while at != have:
            first = min((one for one in begins[at] if one >= have), default=at - 1)
            lengths.append(at - first)
            at = first
        return lengths

    by_distance = {}
    for distance in behind:
        routes = [route(step - distance, step) for step in steps]
        shares = [sum(map(nbytes, one)) / distance for one in routes]
        by_distance[distance] = max(map(len, routes)), max(shares), mean(shares)
    return PlanCost(
        ", ".join(str(n) if n == every else f"{n} every {every}" for n, every in plan.items()),
        sum(nbytes(end - first) for first, end in recent) / PERIOD,
        len(recent) / PERIOD,
        max(len({first for first, end in folds if first <= step < end}) for step in steps),
        by_distance,
    )
