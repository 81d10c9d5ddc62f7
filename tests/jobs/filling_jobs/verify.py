"""Five ranks read a fifth of a checkpoint each and verify it together: `verify.py RUN OUT`.

Writes what each rank got, or its error, and how many messages it received.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from torch import distributed

sys.path.append(str(Path(__file__).resolve().parents[1]))

import ckpt
from ckpt_training.filling import verify_together
from engines import ranks

WORLD = 5


def work(path: Path, out: Path) -> None:
    rank, receive, received = distributed.get_rank(), distributed.recv, list[int]()
    distributed.recv = lambda tensor, source: (received.append(source), receive(tensor, source))
    run = ckpt.open(path)
    parts = [t.flat[t.size * rank // WORLD : t.size * (rank + 1) // WORLD] for _, _, t in run.tensors()]
    with ckpt.Reading(run, resources=ckpt.Resources(workers=1)) as reading:
        reading.fill([(one, np.empty(one.shape, one.dtype)) for one in parts])
        try:
            seals, unverified = verify_together(reading)
            result = {"seals": seals, "unverified": unverified}
        except ckpt.CorruptError as error:
            result = {"error": error.what}
    (out / f"{rank}.json").write_text(json.dumps({**result, "received": received}))


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    ranks.run(WORLD, lambda: work(source, target), target / "logs", join=ranks.join_torch)
