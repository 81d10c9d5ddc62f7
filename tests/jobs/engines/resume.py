"""Resume a checkpoint for real, at any degrees, and compare what the engine then holds with a truth.

`python tests/jobs/engines/resume.py CKPT_DIR TAG --kind K [--stage S ...] --truth OUT/K/truth.pt --report FILE` for
one, with `--universal` if the folder is a universal checkpoint; or `--jobs FILE`, a JSON list of the same as objects,
for many in one process, since importing the engine is slow.

The engine starts from other weights, other frozen parameters and zeroed buffers, so that whatever is right afterwards
came from the checkpoint. Exits 1 if a run failed; a difference from the truth is a result, not a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed

from engines import ranks
from engines.compiled import load
from engines.kinds import KINDS, Kind
from engines.run import start
from engines.truth import differences, gather

OVERRIDES = ("stage", "dtype", "dp", "tp", "pp", "ep", "optimizer")
STEPS_AFTER = 3


@dataclass(frozen=True)
class Resume:
    """One checkpoint to load, by an engine like that of `kind` but for the fields in `changes`."""

    checkpoint: str
    tag: str
    kind: str
    truth: str
    report: str
    universal: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Kind:
        return dataclasses.replace(KINDS[self.kind], **self.changes)


def resume(job: Resume) -> None:
    """Load, compare, train on, and report; called in every rank."""
    run = start(job.target, seed=1, universal=job.universal)
    loaded, client_state = run.engine.load_checkpoint(job.checkpoint, tag=job.tag)
    actual = gather(run)
    report: dict[str, Any] = {
        "job": dataclasses.asdict(job),
        "loaded": loaded,
        "client_state": sorted(client_state or {}),
        "global_steps": run.engine.global_steps,
        "lr": run.engine.get_lr(),
        "evaluation": run.evaluate(),
        "losses_after": run.train(STEPS_AFTER),
    }
    if distributed.get_rank() == 0:
        assert actual is not None
        truth = torch.load(job.truth, weights_only=False)
        report["mismatches"] = differences(truth, actual)
        report["steps"] = {"truth": truth["step"], "found": actual["step"]}
        report["raw_steps"] = {"truth": truth["raw_step"], "found": actual["raw_step"]}
        report["param_groups"] = {
            "truth": _options(truth["param_groups"]),
            "found": _options(actual["param_groups"]),
        }
        log = Path(job.truth).with_name("log.json")
        if log.exists():
            expected = json.loads(log.read_text())
            report["expected"] = {key: expected[key] for key in ("evaluation", "losses_after")}
        Path(job.report).write_text(json.dumps(report, indent=1, default=str))


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of each group and the number of its parameters; their names are in the truth."""
    return [{**{key: value for key, value in group.items() if key != "names"}, "names": len(group["names"])}
            for group in groups]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("tag", nargs="?")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--truth")
    parser.add_argument("--report")
    parser.add_argument("--universal", action="store_true")
    parser.add_argument("--jobs", type=Path)
    for name in OVERRIDES:
        kind = str if name in ("dtype", "optimizer") else int
        parser.add_argument(f"--{name}", type=kind)
    options = parser.parse_args()
    if options.jobs:
        jobs = [Resume(**job) for job in json.loads(options.jobs.read_text())]
    else:
        changes = {name: getattr(options, name) for name in OVERRIDES if getattr(options, name) is not None}
        names = ("checkpoint", "tag", "kind", "truth", "report", "universal")
        jobs = [Resume(**{name: getattr(options, name) for name in names}, changes=changes)]
    failed = 0
    for job in jobs:
        logs = Path(job.report).resolve().with_suffix(".ranks")
        try:
            load(job.target)
            ranks.run(job.target.world, lambda job=job: resume(job), logs)
            print(f"{job.report}: done", flush=True)
        except Exception as error:
            failed += 1
            print(f"{job.report} FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
