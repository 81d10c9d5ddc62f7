"""Resume a checkpoint for real, train on, and save again: `python tests/jobs/engines/train_on.py JOB.json`.

A job has the `checkpoint` and its `tag`, the `kind` of the engine that saved it and what `changes`, how many `steps`
to train before each of how many `saves`, and the folder `out` to save in.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines import ranks
from engines.compiled import load
from engines.kinds import KINDS
from engines.run import start


def main() -> int:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    kind = dataclasses.replace(KINDS[job["kind"]], **job["changes"])

    def train_on() -> None:
        run = start(kind, seed=1)
        run.engine.load_checkpoint(job["checkpoint"], tag=job["tag"])
        for _ in range(job["saves"]):
            run.train(job["steps"])
            run.engine.save_checkpoint(job["out"], tag=f"global_step{run.engine.global_steps}")

    load(kind)
    ranks.run(kind.world, train_on, Path(job["out"]).with_suffix(".ranks"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
