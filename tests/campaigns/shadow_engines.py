"""Shadows that follow real engines, held against the engines' own checkpoints. By hand; the check follows few steps.

    python tests/campaigns/shadow_engines.py [--steps 100] [--saves 50] [--seed 0] [--worlds 2,4] [--kinds ddp]

DDP, FSDP2 and ZeRO 1 to 3 train on so many ranks, are recorded, and save their own checkpoints at random steps. While
they train, shadows follow: through files, over sockets (the log and the state), and in two parts. At each of these
steps, each shadow is frozen, and each weight, moment, count and option must be that of the engine, to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in ("support", "jobs"))

from ckpt_formats.registry.opening import open_checkpoint
from engines.launch import ENVIRONMENT
from followed import WAYS, Followed
from recorded import differences

KINDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def compare(out: Path, saves: list[int], trainer: subprocess.Popen[bytes]) -> dict[str, object]:
    """Follow one run, and compare at each step where it saves. Returns what was compared."""
    stop = threading.Event()
    while not (out / "run.chain" / "chain.json").exists():
        _check(out, trainer)
    followed = Followed(out / "run.chain", stop)
    compared, differ, live = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0), 0
    try:
        for step in saves:
            while not (out / f"{step}.saved").exists():
                _check(out, trainer)
            live += not (out / "seconds").exists()
            saved = open_checkpoint(out / str(step))
            for way in WAYS:
                with followed.at(way, step) as checkpoint:
                    mismatches = differences(checkpoint, saved)
                compared[way] += 1
                differ[way] += bool(mismatches)
                if mismatches:
                    print(out.name, step, way, dict(list(mismatches.items())[:3]), flush=True)
            shutil.rmtree(out / str(step))
        verified = {way: followed.verified(way) for way in WAYS}
    finally:
        stop.set()
        followed.close()
    while not (out / "seconds").exists():
        _check(out, trainer)
    seconds = round(float((out / "seconds").read_text()), 1)
    return {"compared": compared, "differ": differ, "live": live, "verified": verified, "training s": seconds}


def _check(out: Path, trainer: subprocess.Popen[bytes]) -> None:
    time.sleep(0.01)
    if (out / "failed").exists() or trainer.poll() not in (None, 0):
        raise SystemExit(f"{out} failed:\n{(out / 'failed').read_text() if (out / 'failed').exists() else ''}")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("steps", 100), ("saves", 50), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--pause", type=float, default=0.25, help="seconds after each step: or all end before one looks"
    )
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        jobs = []
        for kind in options.kinds.split(","):
            for world in map(int, options.worlds.split(",")):
                draw = random.Random(f"{options.seed}-{kind}-{world}")
                saves = sorted(draw.sample(range(1, options.steps + 1), options.saves))
                out = Path(place) / f"{kind}-{world}"
                out.mkdir()
                jobs.append({"kind": kind, "changes": {"shards": world}, "steps": options.steps} | {"saves": saves})
                jobs[-1] |= {"out": str(out), "pause": options.pause}
        listed = Path(place) / "jobs.json"
        listed.write_text(json.dumps(jobs))
        command = [sys.executable, str(Path(__file__).parents[1] / "jobs/recording_jobs/shadowed.py"), str(listed)]
        with (Path(place) / "said").open("wb") as output:
            trainer = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT})
        try:
            for job in jobs:
                out, saves = Path(str(job["out"])), [int(step) for step in job["saves"]]  # type: ignore[attr-defined]
                report = compare(out, saves, trainer)
                bad += sum(report["differ"].values())  # type: ignore[attr-defined]
                print(json.dumps({"run": out.name, **report}), flush=True)
                shutil.rmtree(out)
        finally:
            trainer.kill()
            trainer.wait()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
