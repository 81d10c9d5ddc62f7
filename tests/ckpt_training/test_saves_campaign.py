"""A sample of the campaign of kills; `run.py saves_kills` in tests/campaigns does many."""

from pathlib import Path

import pytest

from campaigning import campaign
from effort import TIMES


@pytest.mark.slow
@pytest.mark.engines
def test_saves_of_killed_runs_are_whole_and_runs_go_on_from_them(tmp_path: Path) -> None:
    campaign("saves_kills", 3 * TIMES, tmp_path, "--seed", "5")
