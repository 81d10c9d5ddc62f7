"""Go on from restored states: `python tests/jobs/recording_jobs/resume.py JOBS.json`.

A job has the `checkpoint`, the `kind` of the run that loads it, what `changes`, and the file of its `report`: the
losses of the steps that follow. The run begins with other weights: what is right afterwards came from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import distributed

from engines import ranks
from recording_jobs.kinds import AFTER, KINDS, Kind
from recording_jobs.run import start
from recording_jobs.train import joining


def resume(kind: Kind, job: dict[str, Any]) -> None:
    """Load and train on; called in every rank."""
    run = start(kind, seed=1)
    run.load(Path(job["checkpoint"]))
    losses = run.train(AFTER)
    if distributed.get_rank() == 0:
        Path(job["report"]).write_text(json.dumps(losses))


def main() -> int:
    failed = 0
    for job in json.loads(Path(sys.argv[1]).read_text()):
        kind = dataclasses.replace(KINDS[job["kind"]], **job["changes"])
        try:
            logs = Path(job["report"]).with_suffix(".ranks")
            ranks.run(kind.world, lambda kind=kind, job=job: resume(kind, job), logs, join=joining(kind))
        except Exception as error:
            failed += 1
            print(f"{job['report']} FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
