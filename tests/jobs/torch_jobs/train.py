"""Train for real and save in every way: `python tests/jobs/torch_jobs/train.py OUT TRAINING...` (all if none is named).

Writes, for each, OUT/TRAINING/truth.pt (see `truth.gather`), log.json, the ranks' own logs, and OUT/TRAINING-WAY for
each way of saving. Exits 1 and names the trainings which failed; the others are complete.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp

from engines import ranks
from torch_jobs import by_accelerate
from torch_jobs.kinds import TRAININGS, ZOO, Training, Way
from torch_jobs.run import Run, start
from torch_jobs.state import extras, tree
from torch_jobs.truth import gather

STEPS_AFTER = 2


def train(training: Training, out: Path) -> None:
    """Train, save, and train on; called in every rank."""
    run = start(training)
    log: dict[str, Any] = {"training": training.name, "losses": run.train(training.steps)}
    truth = {**gather(run), "extras": extras(run.step)}
    for way in ZOO[training]:
        save(run, way, out / str(training.saved(way)), out)
    log["evaluation"] = run.evaluate()
    log["losses_after"] = run.train(STEPS_AFTER)
    log["torch"] = torch.__version__
    if distributed.get_rank() == 0:
        torch.save(truth, out / training.name / "truth.pt")
        (out / training.name / "log.json").write_text(json.dumps(log, indent=1))


def save(run: Run, way: Way, folder: Path, out: Path) -> None:
    """Write one checkpoint; collective."""
    if distributed.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        if way.over:
            shutil.copytree(out / way.over, folder)
    distributed.barrier()
    if way.keys == "accelerate":
        by_accelerate.save(run, folder)
        return
    extensions = {}
    if way.zstd:
        from torch.distributed.checkpoint._extension import ZStandard

        extensions = {"_extensions": [ZStandard()]}
    writer = dcp.FileSystemWriter(folder, sync_files=False, **way.writer, **extensions)
    state = tree(run, way, run.step)
    if way.asynchronous:
        dcp.async_save(state, storage_writer=writer).result()
    else:
        dcp.save(state, storage_writer=writer, use_collectives=way.collectives)
    distributed.barrier()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("trainings", nargs="*", metavar="TRAINING")
    options = parser.parse_args()
    if unknown := [name for name in options.trainings if name not in TRAININGS]:
        parser.error(f"no such training: {' '.join(unknown)}")
    out = options.out.resolve()
    failed = []
    for name in options.trainings or TRAININGS:
        training = TRAININGS[name]
        shutil.rmtree(out / name, ignore_errors=True)
        began = time.monotonic()
        try:
            ranks.run(training.world, lambda one=training: train(one, out), out / name, join=ranks.join_torch)
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"{name} FAILED: {error}", flush=True)
    if failed:
        print(f"failed: {' '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
