"""Start real torch.distributed jobs from a test, in a process of their own; one process serves any number of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.launch import EngineError, run_script
from torch_jobs.kinds import KINDS, TRAININGS, ZOO

HERE = Path(__file__).parent


def train(trainings: Iterable[str], out: Path) -> None:
    """Train and save in every way, into `out`, after the trainings over whose folders a way saves.

    A training that is there already is not repeated.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = set(trainings)
    if unknown := sorted(names - TRAININGS.keys()):
        raise EngineError(f"no such training: {' '.join(unknown)}")
    over = [KINDS[way.over] for name in names for way in ZOO[TRAININGS[name]] if way.over is not None]
    names |= {kind.training.name for kind in over}
    missing = [name for name in TRAININGS if name in names and not (out / name / "log.json").exists()]
    if missing:
        run_script(HERE / "train.py", [str(out), *missing], len(missing))


def resume_all(jobs: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Run jobs with the fields of `resume.Resume`, each of which leaves its report; what was said if any failed."""
    return _all("resume.py", jobs, folder)


def merge_all(jobs: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Let torch's own tool make one file of each DCP folder (see `merge.py`)."""
    return _all("merge.py", jobs, folder)


def _all(script: str, jobs: Sequence[Mapping[str, Any]], folder: Path) -> str:
    listed = folder / f"{script}.jobs"
    listed.write_text(json.dumps([dict(job) for job in jobs], default=str))
    try:
        run_script(HERE / script, [str(listed)], len(jobs))
    except EngineError as error:
        return str(error)
    return ""
