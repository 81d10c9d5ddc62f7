"""Bases that are copied while real engines train: does each have the values of the engine's own checkpoint?

    bases_campaign.py [--bases 10] [--kinds plain ddp fsdp2 zero1 zero3] [--modes rolling "at once"]

Each run saves its own checkpoint after every step. Each base that the chain names is compared with that of its step,
value by value, also counts of steps and options of groups.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in ("support", "jobs"))

from torch import distributed

from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain.members import open_member
from ckpt_recorder import Bases, Recorder
from engines import ranks
from recorded import differences
from recording_jobs import model
from recording_jobs.kinds import KINDS, Kind
from recording_jobs.run import start
from recording_jobs.train import joining

WIDTH, SECONDS = 270, 600
"""With this width a rank has several chunks, so that the pieces of a rolling base are of several steps."""
MODES = {"rolling": Bases(every=5, spread=4), "at once": Bases(every=5, spread=1)}


def train(kind: Kind, mode: str, bases: int, out: Path) -> None:
    """Train until the chain has so many bases; called in every rank."""
    model.WIDTH = WIDTH
    run = start(kind)
    run.train(2)
    chain, report = out / "run.chain", {"bases": 0, "values": 0, "differences": {}, "steps": 0, "pieces": 0}
    begin = time.monotonic()
    options: dict[str, Any] = {"bases": MODES[mode], "random_states": False, "fingerprint": 0}
    with Recorder(run.model, run.optimizer, chain, step=2, **options) as recorder:
        is_done = False
        while not is_done:
            run.train(1)
            recorder.note(**run.notes())
            run.save(out / f"saved-{recorder.step}")
            report["steps"] += 1
            if recorder._bases.process is not None:
                report["pieces"] = max(report["pieces"], len(list(filter(None, recorder._bases.process._plan))))
            distributed.barrier()
            if distributed.get_rank() == 0:
                compare(chain, out, report)
            enough = report["bases"] >= bases or time.monotonic() - begin > SECONDS
            flags = [enough]
            distributed.broadcast_object_list(flags, src=0)
            is_done = flags[0]
        assert recorder.broken is None
    if distributed.get_rank() == 0:
        (out / "report.json").write_text(json.dumps(report))


def compare(chain: Path, out: Path, report: dict[str, Any]) -> None:
    """Compare the bases that are new, and remove the checkpoints up to them."""
    listed = index.read(chain)
    for member in listed.members[report["bases"] :]:
        base = open_member(chain, listed, member)
        saved = out / f"saved-{member.step}"
        mismatches = differences(base, open_checkpoint(saved))
        report["differences"] |= {f"{member.step}: {name}": what for name, what in mismatches.items()}
        report["values"] += sum(t.size for p in base.parameters.values() for t in p.states.values())
        report["bases"] += 1
        for one in out.glob("saved-*"):
            if int(one.name.partition("-")[2]) <= member.step:
                shutil.rmtree(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", type=int, default=10)
    parser.add_argument("--kinds", nargs="*", default=["plain", "ddp", "fsdp2", "zero1", "zero3"])
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    arguments = parser.parse_args()
    root, total, failed = Path(tempfile.mkdtemp(prefix="bases-")), 0, 0
    print(f"{'kind':12} {'base':8} {'ranks':>5} {'bases':>6} {'of steps':>8} {'values':>12} {'different':>9}")
    for mode in arguments.modes:
        for kind in (KINDS[name] for name in arguments.kinds):
            out = root / f"{kind.name}-{mode.replace(' ', '-')}"
            work = lambda kind=kind, mode=mode, out=out: train(kind, mode, arguments.bases, out)  # noqa: E731
            ranks.run(kind.world, work, out, SECONDS + 60, join=joining(kind))
            report = json.loads((out / "report.json").read_text())
            row = (report["bases"], report["pieces"], report["values"], len(report["differences"]))
            print(f"{kind.name:12} {mode:8} {kind.world:5} {row[0]:6} {row[1]:8} {row[2]:12,} {row[3]:9}", flush=True)
            for name, what in report["differences"].items():
                print(f"  {name}: {what}")
            total, failed = total + row[0], failed + row[3] + (row[0] < arguments.bases)
            shutil.rmtree(out)
    print(f"{total} bases, {failed} failed")
    shutil.rmtree(root)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
