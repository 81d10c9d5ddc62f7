"""Publish live runs of engines: `publish.py OUT KIND...`.

The kinds are those of `recording_jobs`; KIND:store publishes into a bucket. OUT/KIND/policy.chain has the steps,
OUT/KIND/truth-STEP.npz the weights of a step as the engine itself gathers them, cast by torch, and
OUT/KIND/log-RANK.json what each rank noted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / room) for room in ("jobs", "support"))

import numpy as np
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ckpt_formats.core.errors import CkptError
from ckpt_training import Publisher
from ckpt_training.local_shards import as_array
from engines import ranks
from filling_jobs.fill import kind_of
from forked_writers import fork_writers
from recording_jobs.kinds import Kind
from recording_jobs.run import start
from recording_jobs.train import joining
from saving_jobs.steps import FREE, STEPS, megatron_config


def publish(kind: Kind, out: Path, where: str) -> None:
    """Train and publish; called in every rank."""
    if not where:  # a fork has none of the threads of a client of stores
        fork_writers()
    run = start(kind)
    rank, options = distributed.get_rank(), {"names": "as-is"}
    if kind.engine == "megatron":
        config = out / "config.json"
        if rank == 0:
            config.write_text(json.dumps(megatron_config()))
        distributed.barrier()
        options = {"names": "hf", "files": {"config.json": config}}
    log: dict[str, Any] = {"published": [], "failures": []}
    chain = f"s3://bucket/{out.name}/policy.chain" if where else out / "policy.chain"
    with Publisher(run.model, run.optimizer, chain, stall_seconds=60.0, **options) as publisher:
        for number in range(STEPS[-1] + 1):
            if number:
                run.train(1)
            result = publisher.wait(timeout=100.0)
            if [result.step, result.kind] not in log["published"]:  # fp16 overflows at first: that is no step
                log["published"].append([result.step, result.kind])
                note(kind, run, out, result.step)
        if kind.name == "ddp":
            os.kill(publisher.writer_pid or 0, signal.SIGKILL if rank == 1 else 0)
            run.train(1)
            try:
                publisher.wait(timeout=100.0)
            except CkptError as error:
                log["failures"].append(error.what)
        last = publisher.step
        for number in range(FREE):  # nobody waits: ranks must skip the same steps
            if number % 4 == rank:
                os.kill(publisher.writer_pid or 0, signal.SIGSTOP)
            before = publisher.step
            run.train(1)
            if publisher.step != before:  # else, it was skipped: buffers have changed, and there is no step
                note(kind, run, out, publisher.step)
            os.kill(publisher.writer_pid or 0, signal.SIGCONT)
        log["skipped"] = publisher.skipped
        if kind.engine == "fsdp2":
            run.evaluate()  # after which the outermost module has full parameters
        late, step = 0, published(publisher)
        while step is None and kind.name == "ddp" and late < 3:
            late += 1
            run.train(1)  # on a busy machine, the process that was killed may begin again only now
            note(kind, run, out, publisher.step)
            step = published(publisher)
        log["last"] = step, publisher.step - last - late
    (out / f"log-{rank}.json").write_text(json.dumps(log))


def published(publisher: Publisher) -> int | None:
    """The last step, once it is published; None if it is not."""
    try:
        return publisher.wait(timeout=100.0).step
    except CkptError:
        return None


def note(kind: Kind, run: Any, out: Path, step: int) -> None:
    """Store the weights, as the engine gathers them."""
    if kind.engine == "megatron":
        if step:  # before the first one, its optimizer has no states to save
            run.save(out / f"engine-{step}")
        return
    weights = {name: as_published(name, one, run) for name, one in full_weights(kind, run).items()}
    if distributed.get_rank() == 0:
        np.savez(out / f"truth-{step}.npz", **weights)


def full_weights(kind: Kind, run: Any) -> dict[str, torch.Tensor]:
    if kind.engine == "deepspeed":
        module = run.model.module
        own = {name: one for name, one in module.state_dict().items() if name not in dict(module.named_parameters())}
        if kind.stage == 3:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(module.parameters())):
                return own | {name: one.detach().clone() for name, one in module.named_parameters()}
        if kind.dtype == "fp16":
            from deepspeed.utils import safe_get_full_fp32_param

            full = {name: safe_get_full_fp32_param(one) for name, one in module.named_parameters()}
            return own | {name: one if full[name] is None else full[name] for name, one in module.named_parameters()}
        return own | dict(module.named_parameters())
    options = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(run.model, options=options)


def as_published(name: str, tensor: torch.Tensor, run: Any) -> Any:
    """The bytes that are published of a tensor, whose parameters are in bfloat16."""
    buffers = {one.replace("_fsdp_wrapped_module.", "").removeprefix("module.") for one, _ in named_buffers(run)}
    cast = tensor if name in buffers or not tensor.is_floating_point() else tensor.to(torch.bfloat16)
    return np.frombuffer(as_array(cast.detach().contiguous()).tobytes(), np.uint8)


def named_buffers(run: Any) -> Any:
    return run.model.named_buffers()


def main() -> int:
    out, failed = Path(sys.argv[1]).resolve(), 0
    for argument in sys.argv[2:]:
        name, _, where = argument.partition(":")
        kind, place, began = kind_of(name), out / argument.replace(":", "-"), time.monotonic()
        place.mkdir(parents=True)
        try:
            ranks.run(kind.world, partial(publish, kind, place, where), place / "logs", join=joining(kind))
            print(f"{kind.name}: {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:
            failed += 1
            print(f"{kind.name} FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
