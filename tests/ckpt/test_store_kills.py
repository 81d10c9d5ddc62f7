"""A sample of `tests/campaigns/store_kills.py`: kills in front of and after requests, and two writers at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "campaigns" / "store_kills.py"


@pytest.mark.slow
def test_kills_leave_a_target_in_a_store_absent_or_whole() -> None:
    """In a process of its own, which forks: no client of a store may have been used in it before."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "15", "--pairs", "5", "--seed", "7"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("changes of the store") == 5
