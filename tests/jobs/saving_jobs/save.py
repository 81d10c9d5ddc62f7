"""Save live runs, with their engines and with a Saver: `save.py OUT KIND...`.

The kinds are those of `recording_jobs`. OUT/KIND/run.chain has what the Saver saves at the steps `STEPS`;
OUT/KIND/engine what the engine saves at the second of them. OUT/KIND/log.json has the losses after the last one, of the
run and of a new one that loads the save.

KIND:folder saves into OUT/KIND-folder/saves, KIND:store into a bucket; KIND:dcp and KIND:dcpstore do so in the format
of torch. Of KIND:failing, OUT/KIND-failing/messagesRANK.json has the messages of saves that fail.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / room) for room in ("jobs", "support"))

import torch
from torch import distributed

import ckpt
from ckpt_formats.core.errors import CkptError
from ckpt_training import Saver, load
from engines import ranks
from filling_jobs.fill import kind_of
from forked_writers import fork_writers
from recording_jobs.kinds import Kind
from recording_jobs.run import Run, start
from recording_jobs.train import joining
from saving_jobs.steps import AFTER, STEPS


def save(kind: Kind, out: Path, where: str) -> None:
    """Train and save; called in every rank."""
    if not where.endswith("store"):  # a fork has none of the threads of a client of stores
        fork_writers()
    run = start(kind)
    target = target_of(out, where)
    handles, parts = [], parts_of(run)
    options = {"format": ckpt.DCP() if where.startswith("dcp") else None, "protect": 1 if where == "dcp" else None}
    with Saver(run.model, run.optimizer, target, memory=1 << 20, stall_seconds=60.0, **options, **parts) as saver:
        for step in range(1, STEPS[-1] + 1):
            run.train(1)
            if step in STEPS:
                handles.append(saver.save(step))
            if step == STEPS[1]:
                run.save(out / "engine")
        results = [handle.wait(300.0) for handle in handles]
    state = torch.get_rng_state()
    losses = run.train(AFTER)
    log = {"losses": losses, "kinds": [result.kind for result in results], "state": state.tolist()}
    (out / f"log{distributed.get_rank()}.json").write_text(json.dumps(log))


def target_of(out: Path, where: str) -> Any:
    if where.endswith("store"):
        return f"s3://bucket/{out.name}/{'saves' if where.startswith('dcp') else 'run.chain'}"
    return out / ("saves" if where else "run.chain")


def fail(kind: Kind, out: Path, where: str) -> None:
    """Let rank 1 fail in several ways: what the handles of each rank say; called in every rank."""
    fork_writers()
    rank, run, loader = distributed.get_rank(), start(kind), Loader(0)
    messages: list[str] = []
    with Saver(run.model, run.optimizer, out / "run.chain", memory=1 << 20, stall_seconds=8.0, loader=loader) as saver:

        def saved(step: int) -> None:
            run.train(1)
            handle = saver.save(step)
            if rank == 1 and step == 3 and saver.writer_pid is not None:
                os.kill(saver.writer_pid, signal.SIGKILL)
            try:
                messages.append(handle.wait(300.0).kind)
            except CkptError as error:
                messages.append(f"{type(error).__name__}: {error.what}")
            distributed.barrier()

        saved(1)
        loader.is_broken = rank == 1
        saved(2)
        loader.is_broken = False
        saved(3)
        saved(40 if rank else 4)
        saved(50)
    (out / f"messages{rank}.json").write_text(json.dumps(messages))


def resume(kind: Kind, out: Path, where: str) -> None:
    """Load the last save into a new run, and train; called in every rank."""
    log = json.loads((out / f"log{distributed.get_rank()}.json").read_text())
    run = start(kind, seed=1)
    target = target_of(out, where)
    source = f"{target}@{STEPS[-1]}" if str(target).endswith(".chain") else f"{target}/step-{STEPS[-1]:08d}"
    load(source, run.model, run.optimizer, **parts_of(run))
    assert torch.get_rng_state().tolist() == log.pop("state")
    run.step = STEPS[-1]
    log["resumed"] = run.train(AFTER)
    (out / "log.json").write_text(json.dumps(log))


@dataclass
class Loader:
    """A part of which each rank has its own state."""

    at: int
    is_broken: bool = False

    def state_dict(self) -> dict[str, int]:
        if self.is_broken:
            raise RuntimeError("no state now")
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"at": self.at}


def parts_of(run: Run) -> dict[str, Any]:
    """What else is saved of a run. DeepSpeed's engine notes its own."""
    loader = Loader(distributed.get_rank())
    if run.kind.engine == "deepspeed":
        return {"loader": loader}
    return {"loader": loader, **{name: one for name, one in run.notes().items() if hasattr(one, "state_dict")}}


def main() -> int:
    """Run the kinds one after the other, and beside them those that fail: they mostly wait for a rank that is late."""
    out, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    failing = [argument for argument in arguments if argument.endswith(":failing")]
    others = [argument for argument in arguments if argument not in failing]
    pids = []
    for works, part in (((fail,), failing), ((save, resume), others)):
        if not (pid := os.fork()):
            done = [is_done(argument, out, works) for argument in part]
            os._exit(not all(done))
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


def is_done(argument: str, out: Path, works: Sequence[Callable[[Kind, Path, str], None]]) -> bool:
    """Do these works of a kind, and print how long they took or how they failed; whether all are done."""
    name, _, folder = argument.partition(":")
    kind, place, began = kind_of(name), out / argument.replace(":", "-"), time.monotonic()
    try:
        for work in works:
            ranks.run(kind.world, partial(work, kind, place, folder), place / work.__name__, join=joining(kind))
    except Exception as error:
        print(f"{kind.name} FAILED: {error}", flush=True)
        return False
    print(f"{kind.name}: {time.monotonic() - began:.1f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
