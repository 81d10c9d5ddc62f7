"""A sample of the kills of recorded runs; `python tests/campaigns/recording_kills.py --rounds 1000` does many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from effort import TIMES

SCRIPT = Path(__file__).parents[1] / "campaigns" / "recording_kills.py"


@pytest.mark.slow
@pytest.mark.engines
def test_killed_at_random_moments_no_step_is_lost_and_each_is_the_runs(tmp_path: Path) -> None:
    """In a process of its own: its runs are forks, and nothing may have computed with torch before."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--rounds", str(12 * TIMES), "--seed", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{12 * TIMES} kills, 0 failed" in done.stdout
