"""Start the engines from a test, in a process of their own with the environment they need.

One process serves any number of kinds: the scripts fork the ranks of each (see `ranks`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engines.kinds import KINDS

HERE = Path(__file__).parent
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    # Muon compiles its kernels with inductor, which takes longer than the whole zoo.
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
SECONDS = 600
"""For what comes before the first kind or job: imports, and operators that are compiled."""
SECONDS_EACH = 30


class EngineError(Exception):
    """An engine failed; the message names every kind or job which did, and ends with the log."""


def train(kinds: Iterable[str], out: Path) -> None:
    """Train kinds into `out`; a kind which is there already is kept.

    Those which failed are named in one error, after the others are done.
    """
    out.mkdir(parents=True, exist_ok=True)
    missing = [name for name in kinds if not (out / name / "log.json").exists()]
    unknown = [name for name in missing if name not in KINDS]
    if unknown:
        raise EngineError(f"no such kind: {' '.join(unknown)}")
    if missing:
        run_script(HERE / "train.py", [str(out), *missing], len(missing))


def resume(
    checkpoint: Path, tag: str, kind: str, truth: Path, report: Path, universal: bool = False, **changes: Any
) -> dict[str, Any]:
    """Load one checkpoint into an engine like that of `kind` but for `changes`; the report (see `resume.py`)."""
    job = {"checkpoint": checkpoint, "tag": tag, "kind": kind, "truth": truth, "report": report}
    return resume_all([{**job, "universal": universal, "changes": changes}])[0]


def resume_all(jobs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same for many, in one process; each job has the fields of `resume.Resume`."""
    reports = [Path(job["report"]) for job in jobs]
    for report in reports:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
    listed = reports[0].with_suffix(".jobs")
    listed.write_text(json.dumps([dict(job) for job in jobs], default=str))
    run_script(HERE / "resume.py", ["--jobs", str(listed)], len(jobs))
    return [json.loads(report.read_text()) for report in reports]


def to_universal(steps: Mapping[Path, Path]) -> dict[Path, str | None]:
    """Let DeepSpeed's own converter turn folders of a step into universal ones; how it failed, where it did."""
    jobs = [(step, out, out.with_name(f"{out.name}.json")) for step, out in steps.items()]
    for _, out, _ in jobs:
        out.parent.mkdir(parents=True, exist_ok=True)
    listed = jobs[0][2].with_suffix(".jobs")
    listed.write_text(json.dumps(jobs, default=str))
    run_script(HERE / "to_universal.py", [str(listed)], len(jobs))
    return {step: json.loads(log.read_text())["failure"] for step, _, log in jobs}


def run_script(script: Path, arguments: list[str], count: int) -> None:
    """Run a script of `count` kinds or jobs to its end. Raises `EngineError` with its log if it fails."""
    command = [sys.executable, str(script), *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS + SECONDS_EACH * count,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{script.name} still runs after {error.timeout:.0f} s") from error
    if done.returncode:
        raise EngineError(f"{script.name} exited with {done.returncode}:\n{done.stdout[-8000:]}")
