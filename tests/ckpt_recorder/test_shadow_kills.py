"""Trainers and shadows that are killed; `run.py shadow_trainers` in tests/campaigns kills many."""

from pathlib import Path

import pytest

from campaigning import campaign
from effort import TIMES


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(600)
def test_killed_runs_go_on_from_shadows_that_are_killed_as_if_nothing_was(tmp_path: Path) -> None:
    seen = campaign("shadow_trainers", 4 * TIMES, tmp_path, "--seed", "3")
    assert seen["run: kills: trainers"] == 4 * TIMES
    assert seen["run: states compared, same bits"] == 8 * TIMES
