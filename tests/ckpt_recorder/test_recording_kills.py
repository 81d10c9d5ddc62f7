"""A sample of the kills of recorded runs; `run.py recording_kills` in tests/campaigns does many."""

from pathlib import Path

import pytest

from campaigning import campaign
from effort import TIMES


@pytest.mark.slow
@pytest.mark.engines
def test_killed_at_random_moments_no_step_is_lost_and_each_is_the_runs(tmp_path: Path) -> None:
    campaign("recording_kills", 12 * TIMES, tmp_path, "--seed", "5")
