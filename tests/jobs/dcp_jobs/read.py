"""Load checkpoints of any format into live runs, by `dcp.load` with one changed line: the reader is ckpt's.

`python tests/jobs/dcp_jobs/read.py JOBS`: a JSON list of objects with the fields of `torch_jobs.resume.Resume`, and
`refused`: the load must fail, and each rank writes its error to a report of its own, `REPORT.RANK`.
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

from ckpt_training import CkptReader
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


def main() -> int:
    failed = 0
    resume.load = load
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        work = refuse if fields.pop("refused", False) else resume.resume
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
