"""Run the jobs from a test, in a process of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engines.launch import run_script
from megatron_jobs.kinds import KINDS

HERE = Path(__file__).parent


def save(kinds: Iterable[str], out: Path) -> None:
    """Train and save kinds into `out`; one that is there already is kept."""
    missing = [name for name in kinds if name in KINDS and not (out / name / "truth.pt").exists()]
    for name in missing:
        shutil.rmtree(out / name, ignore_errors=True)  # what a run that was killed left
    if missing:
        run_script(HERE / "save.py", [str(out), *missing], len(missing))


def resume(jobs: Mapping[str, Mapping[str, Any]], out: Path, script: str = "resume.py") -> None:
    """Let Megatron go on from checkpoints, legacy ones or (`resume_dist.py`) others; the script says what it leaves."""
    listed = out / "jobs.json"
    listed.write_text(json.dumps(jobs))
    run_script(HERE / script, [str(listed), str(out)], len(jobs))
