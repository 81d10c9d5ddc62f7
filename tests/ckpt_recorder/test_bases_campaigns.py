"""Samples of the campaigns of bases; `bases_campaign.py` and `bases_kills.py` in tests/campaigns do many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from effort import TIMES

HERE = Path(__file__).parents[1] / "campaigns"


def run(script: str, folder: Path, *arguments: str) -> str:
    """In a process of its own: its runs are forks, and nothing may have computed with torch before."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(folder)}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize(("kind", "mode"), [("ddp", "rolling"), ("zero3", "rolling"), ("fsdp2", "at once")])
def test_bases_of_engines_have_the_values_of_their_own_checkpoints(kind: str, mode: str, tmp_path: Path) -> None:
    count = 2 * TIMES
    output = run("bases_campaign.py", tmp_path, "--bases", str(count), "--kinds", kind, "--modes", mode)
    assert f"{count} bases, 0 failed" in output


@pytest.mark.slow
@pytest.mark.engines
def test_killed_while_bases_are_made_a_chain_stays_good(tmp_path: Path) -> None:
    output = run("bases_kills.py", tmp_path, "--rounds", str(6 * TIMES), "--seed", "5")
    assert f"{6 * TIMES} kills, 0 failed" in output
