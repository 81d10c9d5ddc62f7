"""Load checkpoints into live runs of any layout, by torch's plain `dcp.load`, and compare what they hold with truths.

`python tests/jobs/torch_jobs/resume.py JOBS`: a JSON list of objects with `Resume`'s fields; all run in one process.

A run starts from other weights, other frozen parameters and zeroed buffers, so that whatever is right afterwards came
from the checkpoint. Exits 1 if a run failed; a difference from the truth is a result, not a failure.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp

from engines import ranks
from torch_jobs import by_accelerate
from torch_jobs.kinds import TRAININGS, Training, Way
from torch_jobs.run import Run, start
from torch_jobs.state import extras, restore, tree
from torch_jobs.truth import differences_anywhere, gather

STEPS_AFTER = 2


@dataclass(frozen=True)
class Resume:
    """One checkpoint to load, keyed as `keys` says, by a run like `training` but for the fields in `changes`."""

    checkpoint: str
    training: str
    truth: str
    report: str
    keys: str = "nested"
    changes: dict[str, Any] = field(default_factory=dict)
    asks: list[str] | None = None
    """What to ask for beside model and optimizer, where the checkpoint has not all that our runs save."""

    @property
    def target(self) -> Training:
        return dataclasses.replace(TRAININGS[self.training], **self.changes)

    @property
    def way(self) -> Way:
        return Way(self.keys, self.keys)  # type: ignore[arg-type]


def resume(job: Resume) -> None:
    """Load, compare, train on, and report; called in every rank."""
    run = start(job.target, seed=1)
    rest = load(run, job)
    truth = torch.load(job.truth, weights_only=False)
    if "train_state" not in rest:
        run.step = truth["step"]
        if run.scheduler:  # as trainers have it that keep it in a file of its own
            run.scheduler.load_state_dict({**truth["scheduler"], "lr_lambdas": [None for _ in truth["groups"]]})
    actual = gather(run)
    report: dict[str, Any] = {
        "mismatches": differences_anywhere(truth, actual),
        "step": {"truth": truth["step"], "found": run.step},
        "groups": {"truth": truth["groups"], "found": actual["groups"]},
        "scheduler": {"truth": truth["scheduler"], "found": actual["scheduler"]},
        "extras": {key: _same(value, rest[key]) for key, value in extras(run.step).items() if key in rest},
        "evaluation": run.evaluate(),
        "losses_after": run.train(STEPS_AFTER),
    }
    log = Path(job.truth).with_name("log.json")
    report["expected"] = json.loads(log.read_text()) if log.exists() else continued(job.target, truth)
    if distributed.get_rank() == 0:
        Path(job.report).write_text(json.dumps(report, indent=1))


def load(run: Run, job: Resume) -> dict[str, Any]:
    """Load a checkpoint into the run; what it holds beside."""
    if job.keys == "accelerate":
        by_accelerate.load(run, Path(job.checkpoint))
        return {}
    state = tree(run, job.way, 0)
    if job.asks is not None:
        state = {key: state[key] for key in ("model", "optim", *job.asks)}
    dcp.load(state, checkpoint_id=job.checkpoint)
    return restore(run, job.way, state)


def continued(training: Training, truth: dict[str, Any]) -> dict[str, Any]:
    """How training goes on from a truth by plain modules, on whole batches and without any checkpoint."""
    run = start(dataclasses.replace(training, wrapper="none", shards=1, replicas=1, tp=1))
    run.model.load_state_dict(truth["model"])
    named = run.names()
    for group, stated in zip(run.optimizer.param_groups, truth["groups"], strict=True):
        assert [id(param) for param in group["params"]] == [id(named[name]) for name in stated["names"]]
        group.update({key: stated[key] for key in group.keys() & stated.keys()})
    for name, states in truth["optimizer"].items():
        run.optimizer.state[named[name]] = {key: value.clone() for key, value in states.items()}
    run.step = truth["step"]
    return {"evaluation": run.evaluate(), "losses_after": run.train(STEPS_AFTER)}


def _same(a: Any, b: Any) -> bool:
    """Equal in type and value, down to the bits of tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def main() -> int:
    failed = 0
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        job = Resume(**fields)
        logs = Path(job.report).resolve().with_suffix(".ranks")
        try:
            ranks.run(job.target.world, lambda job=job: resume(job), logs, join=ranks.join_torch)
            print(f"{job.report}: done", flush=True)
        except Exception as error:
            failed += 1
            print(f"{job.report} FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
