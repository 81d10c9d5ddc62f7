"""Bases that are copied while real engines train: does each have the values of the engine's own checkpoint?

Each run saves its own checkpoint after every step. Each base that the chain names is compared with that of its step,
value by value, also counts of steps and options of groups.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed

from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.members import open_member
from ckpt_recorder import Bases, Recorder
from engines import ranks
from forked_writers import fork_writers
from recorded import differences
from recording_jobs import model
from recording_jobs.kinds import KINDS, Kind
from recording_jobs.run import start
from recording_jobs.train import joining
from run import Round, alternated

NAMES = ("plain", "ddp", "fsdp2", "zero1", "zero3")
COUNT, WIDTH, SECONDS = 2, 270, 600
"""With this width a rank has several chunks, so that the pieces of a rolling base are of several steps."""
BESIDE = 2
"""Steps while a base is made of which all is copied; then the training waits, as each step costs a checkpoint."""
MODES = {"rolling": Bases(every=5, spread=4), "at once": Bases(every=5, spread=1)}


def train(kind: Kind, mode: str, out: Path) -> None:
    """Train until the chain has its bases; called in every rank."""
    fork_writers()
    model.WIDTH = WIDTH
    run = start(kind)
    run.train(2)
    chain, report = out / "run.chain", {"bases": 0, "values": 0, "differences": {}, "steps": 0, "pieces": 0}
    begin = time.monotonic()
    options: dict[str, Any] = {"bases": MODES[mode], "random_states": False, "fingerprint": 0}
    options["prove"] = mode == "at once"  # the replay beside the run takes as much as the training
    with Recorder(run.model, run.optimizer, chain, step=2, **options) as recorder:
        is_done, beside = False, 0
        while not is_done:
            run.train(1)
            recorder.note(**run.notes())
            run.save(out / f"saved-{recorder.step}")
            report["steps"] += 1
            if recorder._run.bases.process is not None:
                report["pieces"] = max(report["pieces"], len(list(filter(None, recorder._run.bases.process._plan))))
            beside = beside + 1 if is_making(recorder) else 0
            while beside > BESIDE and is_making(recorder):
                time.sleep(0.005)
            distributed.barrier()
            if distributed.get_rank() == 0:
                compare(chain, out, report)
            enough = report["bases"] >= COUNT or time.monotonic() - begin > SECONDS
            flags = [enough]
            distributed.broadcast_object_list(flags, src=0)
            is_done = flags[0]
        assert recorder.broken is None
    if distributed.get_rank() == 0:
        (out / "report.json").write_text(json.dumps(report))


def is_making(recorder: Recorder) -> bool:
    """Does the process beside this rank make a base of what was copied?"""
    process = recorder._run.bases.process if recorder._run.bases is not None else None
    return process is not None and not (process._todo or process.is_ready or process.has_failed)


def compare(chain: Path, out: Path, report: dict[str, Any]) -> None:
    """Compare the bases that are new, and remove the checkpoints up to them."""
    listed = chain_file.read(chain)
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


def one_run(kind: Kind, mode: str, folder: Path) -> dict[str, int]:
    """Train once, and compare all bases."""
    out = Path(tempfile.mkdtemp(dir=folder))
    ranks.run(kind.world, partial(train, kind, mode, out), out, SECONDS + 60, join=joining(kind))
    report = json.loads((out / "report.json").read_text())
    shutil.rmtree(out)
    assert not report["differences"], report["differences"]
    assert report["bases"] >= COUNT, report
    return {"bases, same bits": report["bases"], "values": report["values"], "most steps of a base": report["pieces"]}


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    runs = {f"{name}, {mode}": partial(one_run, KINDS[name], mode, folder) for mode in MODES for name in NAMES}
    yield from alternated(runs)
