"""Start the recorded runs from a test, in a process of their own; one process serves any number of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.launch import run_script

HERE = Path(__file__).parent


def train(kinds: Iterable[str], out: Path) -> None:
    """Train and record kinds into `out`. Raises `EngineError` that names those which failed."""
    names = list(kinds)
    run_script(HERE / "train.py", [str(out), *names], len(names))


def resume_all(jobs: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Run jobs with the fields that `resume.py` says, each of which leaves its report."""
    listed = folder / "resume.jobs"
    listed.write_text(json.dumps([dict(job) for job in jobs], default=str))
    run_script(HERE / "resume.py", [str(listed)], len(jobs))


def run_examples(jobs: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Run jobs with the fields that `examples.py` says."""
    listed = folder / "examples.jobs"
    listed.write_text(json.dumps([dict(job) for job in jobs], default=str))
    run_script(HERE / "examples.py", [str(listed)], len(jobs))
