"""Start the engines from a test, in a process of their own with the environment they need.

One process serves any number of kinds: the scripts fork the ranks of each (see `ranks`), and are forks themselves (see
`forks`).
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
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
    limit = SECONDS + SECONDS_EACH * count
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        log = Path(folder) / "log"
        variables = {**os.environ, **ENVIRONMENT}
        job = {"script": str(script), "arguments": arguments, "environment": variables, "output": str(log)}
        status = _forks().run(job, limit)
        message = log.read_text(errors="replace") if log.exists() else ""
    if status is None:
        raise EngineError(f"{script.name} still runs after {limit:.0f} s")
    if status:
        raise EngineError(f"{script.name} exited with {status}:\n{message[-8000:]}")


class _Forks:
    """The process of `forks.py`, which this one ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "forks.py")],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what is read ahead would not wake `select`
        )
        atexit.register(self._end, os.getpid())

    def run(self, job: Mapping[str, Any], limit: float) -> int | None:
        """Run a script; its exit status, or None if it was ended at the limit, in seconds."""
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        questions.write(f"{json.dumps(job)}\n".encode())
        pid = int(answers.readline())
        status = None
        try:
            if select.select([answers], [], [], limit)[0]:
                status = int(answers.readline())
        finally:
            if status is None:
                os.killpg(pid, signal.SIGKILL)
                answers.readline()
        return status

    def _end(self, owner: int) -> None:
        if os.getpid() == owner:  # and not a fork
            self._process.kill()
            self._process.communicate()


@cache
def _forks() -> _Forks:
    return _Forks()
