"""Run the jobs from a test, in a process of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engines.launch import run_script
from rank_jobs.kinds import KINDS

HERE = Path(__file__).parent


def train(kinds: Iterable[str], out: Path) -> None:
    """Train kinds into `out`; one that is there already is kept."""
    missing = [name for name in kinds if name in KINDS and not (out / name / "truth.pt").exists()]
    if missing:
        run_script(HERE / "train.py", [str(out), *missing], len(missing))
