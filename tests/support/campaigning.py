"""Samples of campaigns that fork processes which compute with torch."""

import json
import os
import sys
from pathlib import Path

from engines.launch import run_script

RUN = Path(__file__).parents[1] / "campaigns" / "run.py"


def campaign(work: str, rounds: int, folder: Path, *options: str) -> dict[str, int]:
    """Run so many rounds in a process of its own, in which nothing has computed with torch. Return what was seen."""
    paths = os.pathsep.join(filter(None, sys.path))
    arguments = [work, "--rounds", str(rounds), *options, "--json", str(folder / "report")]
    run_script(RUN, arguments, rounds, PYTHONPATH=paths, TMPDIR=str(folder))
    report = json.loads((folder / "report").read_text())
    assert report["rounds"] == rounds
    seen: dict[str, int] = report["seen"]
    return seen
