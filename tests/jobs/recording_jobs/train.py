"""Record real runs: `python tests/jobs/recording_jobs/train.py OUT KIND...` (all if none is named).

Afterwards, OUT/refused.json has what is said of runs that cannot be recorded.

Each kind trains `WARM_UP` steps, saves its own checkpoint, OUT/KIND/base, and is recorded from there into two chains:
`based.chain`, which has that checkpoint, and `bare.chain`, which has none. OUT/KIND/middle and OUT/KIND/end are what
the engine saves on the way. OUT/KIND/log.json has the losses of all steps.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / room) for room in ("jobs", "support"))

import torch
from torch import distributed

from ckpt_formats.core.errors import UnsupportedError
from ckpt_recorder import Recorder
from damage import ckpt
from engines import ranks
from forked_writers import fork_writers
from recording_jobs.kinds import KINDS, MIDDLE, WARM_UP, Kind
from recording_jobs.run import Run, start


def train(kind: Kind, out: Path) -> None:
    """Train, record and save; called in every rank."""
    run = start(replace(kind, loss_scale=(18, 2)))  # the middle step overflows, among others
    losses = run.train(WARM_UP)
    before = skipped_of(run)
    run.save(out / "base")
    distributed.barrier()
    if kind.engine in ("fsdp1", "fsdp2"):
        run.evaluate()
    if distributed.get_rank() == 0 and "based.chain" in kind.chains:
        done = ckpt("append", out / "based.chain", out / "base", "--step", WARM_UP)
        assert done.code == 0, done.err
    distributed.barrier()
    with ExitStack() as stack:
        recorders = [
            stack.enter_context(Recorder(run.model, run.optimizer, out / name, step=WARM_UP, fingerprint=5))
            for name in kind.chains
        ]
        for step in range(WARM_UP, kind.end):
            if step == MIDDLE:
                run.save(out / "middle")
                middle = recorders[0].step  # not MIDDLE where skipped steps are not counted
            losses += run.train(1)
            for recorder in recorders:
                recorder.note(**run.notes())
        assert all(recorder.broken is None for recorder in recorders)
        steps, exactness = recorders[0].step, recorders[0].exactness
        skipped = kind.end - steps + skipped_of(run) - before
    run.save(out / "end")
    if distributed.get_rank() == 0:
        log = {"losses": losses, "middle": middle, "end": steps, "skipped": skipped, "exactness": exactness}
        (out / "log.json").write_text(json.dumps(log, indent=1))


def skipped_of(run: Run) -> int:
    """How many of the steps that the recorder counts were skipped: those of DeepSpeed, which counts them, too."""
    return int(getattr(run.model, "skipped_steps", 0))


def main() -> int:
    out, failed = Path(sys.argv[1]).resolve(), []
    fork_writers()
    for kind in [KINDS[name] for name in sys.argv[2:] or KINDS]:
        began = time.monotonic()
        try:
            ranks.run(kind.world, lambda kind=kind: train(kind, out / kind.name), out / kind.name, join=joining(kind))
            print(f"{kind.name}: {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:
            failed.append(kind.name)
            print(f"{kind.name} FAILED: {error}", flush=True)
    try:
        ranks.run(2, lambda: refuse(out), out / "refused", join=ranks.join_deepspeed)
    except Exception as error:
        failed.append("refused")
        print(f"refused FAILED: {error}", flush=True)
    return 1 if failed else 0


def refuse(out: Path) -> None:
    """Try what cannot be recorded; called in every rank."""
    messages = {}
    run = start(Kind("differing", "plain"), seed=distributed.get_rank())
    messages["differing"] = refusal(run, out / "differing.chain")
    messages["diverging"] = diverging(out)
    if distributed.get_rank() == 0:
        (out / "refused.json").write_text(json.dumps(messages, indent=1))


def diverging(out: Path) -> str:
    """Train parts of one model that have the same names and begin with the same weights; what the recorder says.

    Another recorder gets names of their own for them. OUT/part-RANK.pt is what each rank has in the end.
    """
    rank = distributed.get_rank()
    run = start(Kind("diverging", "plain"))
    run.step = rank  # another batch for each
    with (
        warnings.catch_warnings(record=True),
        Recorder(run.model, run.optimizer, out / "diverging.chain") as recorder,
        Recorder(run.model, run.optimizer, out / "renamed.chain", rename=lambda name: f"part{rank}.{name}") as other,
    ):
        run.train(2)
        assert other.broken is None
    states = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    torch.save(states, out / f"part-{rank}.pt")
    return recorder.broken or "it is recorded"


def refusal(run: Run, chain: Path) -> str:
    """What the recorder says of a run that it refuses."""
    try:
        Recorder(run.model, run.optimizer, chain)
    except UnsupportedError as error:
        return str(error)
    return "it is recorded"


def joining(kind: Kind):  # type: ignore[no-untyped-def]
    """How its ranks join. What they need is loaded first, once for all: operators that DeepSpeed compiles, Megatron."""
    if kind.engine == "megatron":
        import_module("recording_jobs.megatron_run")
    if kind.engine != "deepspeed":
        return ranks.join_torch
    from engines.compiled import load
    from engines.kinds import Kind as EngineKind

    load(EngineKind(kind.name, optimizer="cpu-adamw" if kind.optimizer == "cpu-adam" else "torch-adamw"))
    return ranks.join_deepspeed


if __name__ == "__main__":
    sys.exit(main())
