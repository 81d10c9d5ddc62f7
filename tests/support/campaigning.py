"""Samples of campaigns that fork processes which compute with torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[1] / "campaigns" / "run.py"


def campaign(work: str, rounds: int, folder: Path, *options: str) -> dict[str, int]:
    """Run so many rounds in a process of its own, in which nothing has computed with torch. Return what was seen."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(folder)}
    command = [sys.executable, str(RUN), work, "--rounds", str(rounds), *options, "--json", str(folder / "report")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "report").read_text())
    assert report["rounds"] == rounds
    seen: dict[str, int] = report["seen"]
    return seen
