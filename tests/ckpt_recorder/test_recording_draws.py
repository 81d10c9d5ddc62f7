"""A sample of the draws of tests/campaigns/recording_draws.py: outside changes and flipped bits of short runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

import recording_draws
from effort import TIMES

SEEDS = {"outside": (1, 7), "faults": (0, 2)}
"""Of other trainers and ways each: a process that writes is most of their time."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["outside", "faults"])
def test_what_is_drawn_is_recorded_as_it_was(kind: Literal["outside", "faults"], tmp_path: Path) -> None:
    for seed in SEEDS[kind] if TIMES == 1 else range(2 * TIMES):
        one = recording_draws.draw(kind, seed, recording_draws.SHORT)
        assert recording_draws.outcome_of(one, tmp_path / str(seed), restores=0)[0] == "recorded", one
