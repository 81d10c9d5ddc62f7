"""Run the jobs from a test, in a process of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engines.launch import run_script
from megatron_jobs.kinds import KINDS

HERE = Path(__file__).parent


def save(kinds: Iterable[str], out: Path) -> None:
    """Train and save kinds into `out`; one that is there already is kept."""
    missing = [name for name in kinds if name in KINDS and not (out / name / "truth.pt").exists()]
    if missing:
        run_script(HERE / "save.py", [str(out), *missing], len(missing))
