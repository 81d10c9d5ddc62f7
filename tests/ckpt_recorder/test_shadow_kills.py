"""Trainers and shadows that are killed; `python tests/campaigns/shadow_trainers.py --kills 200` kills many."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from effort import TIMES

SCRIPT = Path(__file__).parents[1] / "campaigns" / "shadow_trainers.py"


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(600)
def test_killed_runs_go_on_from_shadows_that_are_killed_as_if_nothing_was(tmp_path: Path) -> None:
    """In a process of its own: its runs are forks, and nothing may have computed with torch before."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--kills", str(4 * TIMES), "--seed", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kills"]["trainers"] == 4 * TIMES
    assert report["states compared, same bits"] == 8 * TIMES
