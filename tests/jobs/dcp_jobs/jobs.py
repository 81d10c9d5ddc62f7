"""Load and save live runs through `dcp.load` and `dcp.save` with one changed line: reader and writer are ckpt's.

`python tests/jobs/dcp_jobs/jobs.py JOBS`: a JSON list of objects with the fields of `torch_jobs.resume.Resume`, and
`work`: `load`; `refuse`, which loads in vain and writes the error of each rank to `REPORT.RANK`; `save`,
which trains a step and saves by both writers, to `REPORT.own` and `REPORT.torch`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ckpt_training import CkptReader, CkptWriter
from engines import ranks
from torch_jobs import resume
from torch_jobs.run import Run, start
from torch_jobs.state import restore, tree


def load(run: Run, job: resume.Resume) -> dict[str, Any]:
    """Load a checkpoint into the run; what it holds beside."""
    state = tree(run, job.way, 0)
    if job.asks is not None:
        state = {key: state[key] for key in ("model", "optim", *job.asks)}
    dcp.load(state, storage_reader=CkptReader(job.checkpoint))
    return restore(run, job.way, state)


def refuse(job: resume.Resume) -> None:
    """Load in vain; called in every rank."""
    try:
        load(start(job.target, seed=1), job)
    except CheckpointException as error:
        own = distributed.get_rank()
        failure = error.failures[own][0]
        Path(f"{job.report}.{own}").write_text(json.dumps({"kind": type(failure).__name__, "text": str(failure)}))


def save(job: resume.Resume) -> None:
    """Save a run by ckpt's writer and by torch's; called in every rank."""
    run = start(job.target)
    run.train(1)
    state = tree(run, job.way, 1)
    dcp.save(state, storage_writer=CkptWriter(f"{job.report}.own"))
    dcp.save(state, checkpoint_id=f"{job.report}.torch")


def main() -> int:
    failed = 0
    resume.load = load
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        work = {"load": resume.resume, "refuse": refuse, "save": save}[fields.pop("work")]
        job = resume.Resume(**fields)
        logs = Path(job.report).resolve().with_suffix(".ranks")
        try:
            ranks.run(job.target.world, lambda job=job, work=work: work(job), logs, join=ranks.join_torch)
        except ranks.RunFailed as error:
            failed += 1
            print(f"{job.report} FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
