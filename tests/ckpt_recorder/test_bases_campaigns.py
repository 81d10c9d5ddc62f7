"""Samples of the campaigns of bases; `run.py bases` and `run.py bases_kills` in tests/campaigns do many."""

from pathlib import Path

import pytest

from campaigning import campaign
from effort import TIMES

SAMPLE = ("ddp, rolling", "zero3, rolling", "fsdp2, at once")


@pytest.mark.slow
@pytest.mark.engines
def test_bases_of_engines_have_the_values_of_their_own_checkpoints(tmp_path: Path) -> None:
    chosen = (option for name in SAMPLE for option in ("--only", name))
    seen = campaign("bases", len(SAMPLE) * TIMES, tmp_path, *chosen)
    assert all(seen[f"{name}: bases, same bits"] >= 2 * TIMES for name in SAMPLE)


@pytest.mark.slow
@pytest.mark.engines
def test_killed_while_bases_are_made_a_chain_stays_good(tmp_path: Path) -> None:
    campaign("bases_kills", 6 * TIMES, tmp_path, "--seed", "5")
