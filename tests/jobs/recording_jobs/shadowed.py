"""Record runs that save their own checkpoints at many steps: `python tests/jobs/recording_jobs/shadowed.py JOBS.json`.

A job has the `kind` of the run, what `changes`, how many `steps` it trains, how long it
`pause`s after each, at which of them it `saves`, and its folder
`out`. The log is in OUT/run.chain; the engine's checkpoint of step N is OUT/N, complete when OUT/N.saved exists.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / room) for room in ("jobs", "support"))

from torch import distributed

from ckpt_recorder import Recorder
from engines import ranks
from recording_jobs.kinds import KINDS, Kind
from recording_jobs.run import start
from recording_jobs.train import joining


def train(kind: Kind, job: dict[str, Any]) -> None:
    """Train, record and save; called in every rank."""
    out, saves = Path(job["out"]), set(job["saves"])
    run = start(kind)
    with Recorder(run.model, run.optimizer, out / "run.chain", fingerprint=10) as recorder:
        for step in range(1, job["steps"] + 1):
            run.train(1)
            time.sleep(job["pause"])
            recorder.note(**run.notes())
            assert recorder.broken is None
            assert recorder.step == step
            if step in saves:
                run.save(out / str(step))
                distributed.barrier()
                if distributed.get_rank() == 0:
                    (out / f"{step}.saved").touch()


def main() -> int:
    failed = 0
    for job in json.loads(Path(sys.argv[1]).read_text()):
        kind, out = dataclasses.replace(KINDS[job["kind"]], **job["changes"]), Path(job["out"])
        began = time.monotonic()
        try:
            ranks.run(kind.world, lambda kind=kind, job=job: train(kind, job), out, timeout=900, join=joining(kind))
            (out / "seconds").write_text(str(time.monotonic() - began))
        except Exception as error:
            failed += 1
            (out / "failed").write_text(str(error))
            print(f"{out} FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
