"""Start jobs that load and save through the storage reader and writer of ckpt, all in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.launch import run_script

HERE = Path(__file__).parent


def run_all(jobs: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Run jobs of `jobs.py`, each of which leaves its report. Raises `EngineError` if one failed."""
    listed = folder / "jobs.json"
    listed.write_text(json.dumps([dict(job) for job in jobs], default=str))
    run_script(HERE / "jobs.py", [str(listed)], len(jobs))
