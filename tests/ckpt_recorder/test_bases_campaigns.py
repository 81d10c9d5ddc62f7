"""Samples of the campaigns of bases; `run.py bases` and `run.py bases_kills` in tests/campaigns do many."""

from pathlib import Path

import pytest

from campaigning import campaign
from effort import TIMES


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize(("kind", "mode"), [("ddp", "rolling"), ("zero3", "rolling"), ("fsdp2", "at once")])
def test_bases_of_engines_have_the_values_of_their_own_checkpoints(kind: str, mode: str, tmp_path: Path) -> None:
    seen = campaign("bases", TIMES, tmp_path, "--only", f"{kind}, {mode}")
    assert seen[f"{kind}, {mode}: bases, same bits"] >= 2 * TIMES


@pytest.mark.slow
@pytest.mark.engines
def test_killed_while_bases_are_made_a_chain_stays_good(tmp_path: Path) -> None:
    campaign("bases_kills", 6 * TIMES, tmp_path, "--seed", "5")
