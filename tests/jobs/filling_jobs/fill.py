"""Fill live runs through their local shards, and let their engines save them: `fill.py OUT KIND...`.

Of KIND:WAY:WAY, runs go on in these ways: see `go_on`. The kind `stages` is a pipeline: see `stages`.

The kinds are those of `recording_jobs`. OUT/KIND/saved is what the engine saves of a run that had other weights and
has not trained, OUT/KIND/rankN.json the parts that rank N has filled.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / room) for room in ("jobs", "support"))

import torch
from torch import distributed

from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import MASTER, MODEL
from ckpt_training.engines.registry import tracked_run
from ckpt_training.engines.run import TrackedRun, clean_name
from ckpt_training.local_shards import LocalPart, LocalShard, dtype_name
from ckpt_training.run_shards import masters_of, model_shards_of, states_of
from engines import ranks
from engines.kinds import KINDS as ENGINE_KINDS
from filling_jobs.go_on import go_on
from filling_jobs.stages import go_on_in_stages
from filling_jobs.values import values_of
from recording_jobs.kinds import KINDS, LOADED, Kind
from recording_jobs.run import start
from recording_jobs.train import joining

STEP = 7


def fill(kind: Kind, out: Path) -> None:
    """Fill and save; called in every rank."""
    run = start(kind, seed=1)
    if kind.engine in ("fsdp1", "fsdp2"):
        run.evaluate()  # the outermost module has full parameters then
    rank = distributed.get_rank()
    tracked = tracked_run(run.model, run.optimizer, rank, is_recorded=False)
    parts = [write(shard) for shard in model_shards_of(tracked)]
    masters = [write(shard) for shard in masters_of(tracked)]
    parts += masters
    for number, one in enumerate(tracked.tensors):
        state = tracked.optimizers[one.optimizer].state[one.tensor]
        names = ("momentum_buffer",) if kind.optimizer == "sgd" else ("exp_avg", "exp_avg_sq")
        state.update({name: torch.zeros_like(one.tensor) for name in names if name not in state})
        if kind.optimizer != "sgd":
            state["step"] = torch.tensor(float(STEP))
        parts += [write(shard) for shard in states_of(tracked, number)]
    tracked.refresh()
    tracked.set_step(STEP)
    assert wrong_copies(tracked) == []
    run.save(out / "saved")
    run.train(1)  # it still can
    (out / f"rank{rank}.json").write_text(json.dumps(parts))


def kind_of(name: str) -> Kind:
    """A kind of `recording_jobs`, or of `engines`."""
    if name in KINDS or name in LOADED:
        return {**KINDS, **LOADED}[name]
    trained = ENGINE_KINDS[name]
    return Kind(name, "deepspeed", trained.dp, tp=trained.tp, pp=trained.pp, stage=trained.stage, zoo=name)


def write(shard: LocalShard) -> list[Any]:
    """Write the values that belong to a shard; its name, state, dtype, and where it is in the parameter."""
    part = shard.part
    is_integer = not shard.memory.dtype.is_floating_point
    block = torch.from_numpy(values_of(part.name, shard.state, part.shape, is_integer))[part.box.index]
    values = block.reshape(-1)[part.start : part.stop]
    assert shard.memory.shape == (block.shape if part.is_block else values.shape)
    with torch.no_grad():
        shard.memory.copy_(values.view(shard.memory.shape))
    return [
        part.name,
        shard.state,
        dtype_name(shard.memory.dtype),
        part.shape,
        part.box.start,
        part.box.stop,
        part.start,
        part.stop,
    ]


def wrong_copies(tracked: TrackedRun) -> list[str]:
    """The parameters that the model computes with although the values of their masters are others."""
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, {shard.name for shard in masters_of(tracked)})
    with_master = set().union(*every)
    wrong = [shard.name for shard in model_shards_of(tracked) if not is_right(shard, shard.name in with_master)]
    tracked.refresh()  # stage 3 frees full parameters to list shards
    for name, parameter in tracked.model.named_parameters():
        if hasattr(parameter, "ds_id"):
            from deepspeed import zero

            with zero.GatheredParameters([parameter]):  # or kept whole on every rank, if it is small
                full = tracked.rename(clean_name(name))
                shape = tuple(parameter.shape)
                part = LocalPart(full, shape, "", Box.whole(shape), 0, parameter.numel(), 0)
                if not is_right(LocalShard(part, MODEL, "frozen", parameter.detach()), full in with_master):
                    wrong.append(full)
    return wrong


def is_right(shard: LocalShard, has_master: bool) -> bool:
    memory = shard.memory.clone()
    write(LocalShard(shard.part, MASTER if has_master else shard.state, shard.role, memory))
    return torch.equal(memory, shard.memory)


def main() -> int:
    out, failed = Path(sys.argv[1]).resolve(), 0
    for name, *ways in (argument.split(":") for argument in sys.argv[2:]):
        folder, began = out / ":".join([name, *ways]), time.monotonic()
        try:
            if name == "stages":
                ranks.run(2, lambda folder=folder: go_on_in_stages(folder), folder, join=ranks.join_torch)
            elif ways:
                go_on(kind_of(name), ways, folder)
            else:
                kind = kind_of(name)
                ranks.run(kind.world, lambda kind=kind, folder=folder: fill(kind, folder), folder, join=joining(kind))
            print(f"{folder.name}: {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:
            failed += 1
            print(f"{folder.name} FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
