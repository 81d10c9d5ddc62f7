"""Real Megatron core goes on from legacy checkpoints: `resume.py JOBS OUT`, a JSON list of jobs.

A job names a kind, what is other about it (`{"tp": 4, ...}`), and a run folder. Each loads that folder as
megatron.training does, into a model and an optimizer of other values, and makes OUT/NAME with

    logits.pt   what the model computes, whole
    loaded/     what Megatron saves at once
    stepped/    what it saves after one more step, whose gradients depend on the weights alone
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe import moe_utils

from engines import ranks
from megatron_jobs import without_cuda
from megatron_jobs.kinds import KINDS, Kind
from megatron_jobs.predictions import with_predictions
from megatron_jobs.save import arguments, save_legacy, trained

INPUT = (torch.arange(24) * 7 % 64).reshape(2, 12)


def resume(kind: Kind, source: Path, out: Path) -> None:
    wrapped, optimizer, config = trained(kind, steps=1)
    with torch.no_grad():
        for model in wrapped:
            for parameter in model.module.parameters():
                parameter.add_(1.0)
    with torch.no_grad():
        load(kind, wrapped, optimizer, source)
    logits = logits_of(kind, [model.module for model in wrapped])
    if logits is not None:
        torch.save(logits, out / "logits.pt")
    common = {"args": arguments(kind, config), "checkpoint_version": 3.0, "iteration": 2}
    save_legacy(kind, wrapped, optimizer, common, out / "loaded")
    for model in wrapped:
        for parameter in model.module.parameters():
            parameter.main_grad.copy_(parameter.detach().float() * 0.5)
    optimizer.step()
    save_legacy(kind, wrapped, optimizer, common, out / "stepped")


def load(kind: Kind, wrapped: list[Any], optimizer: Any, run: Path) -> None:
    """As megatron.training loads the format `torch`."""
    numbers = [f"{parallel_state.get_tensor_model_parallel_rank():02d}"]
    if kind.pp > 1:
        numbers.append(f"{parallel_state.get_pipeline_model_parallel_rank():03d}")
    if kind.ep > 1:
        numbers.append(f"{parallel_state.get_expert_model_parallel_rank():03d}")
    iteration = int((run / "latest_checkpointed_iteration.txt").read_text())
    folder = run / f"iter_{iteration:07d}" / "_".join(["mp_rank", *numbers])
    state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    for number, model in enumerate(wrapped):
        model.load_state_dict(state["model" if len(wrapped) == 1 else f"model{number}"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    if kind.distributed:
        with without_steps(optimizer):
            optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))


@contextmanager
def without_steps(optimizer: Any) -> Iterator[None]:
    """Megatron expects fused Adam, for GPUs. It trips over the steps that PyTorch's keeps, and makes them all one."""
    held = [state for one in optimizer.chained_optimizers for state in one.optimizer.state.values()]
    steps = [state.pop("step") for state in held]
    yield
    for state, step in zip(held, steps, strict=True):
        state["step"] = step.clone()


def logits_of(kind: Kind, models: list[Any]) -> torch.Tensor | None:
    """What the whole model computes, on the first rank of the last stage. Stages hand on what they have."""
    stage, tp = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    places = kind.pp * len(models)
    length, hidden = INPUT.shape[1], kind.model["hidden_size"]
    positions = torch.arange(length).expand(*INPUT.shape)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    logits = None
    with torch.no_grad():
        for place in range(places):
            if place % kind.pp != stage:
                continue
            model = models[place // kind.pp].eval()
            if place:
                received = torch.empty(length, len(INPUT), hidden)
                torch.distributed.recv(received, group=group, group_src=(place - 1) % kind.pp)
                model.set_input_tensor([received.to(next(model.parameters()).dtype)])
            compute = partial(with_predictions, model) if getattr(model, "mtp", None) is not None else model
            logits = compute(INPUT, positions, mask).float().contiguous()
            if place + 1 < places:
                torch.distributed.send(logits, group=group, group_dst=(place + 1) % kind.pp)
    if stage != kind.pp - 1 or logits is None:
        return None
    parts = [torch.empty_like(logits) for _ in range(kind.tp)]
    torch.distributed.all_gather(parts, logits, parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1) if tp == 0 and parallel_state.get_data_parallel_rank() == 0 else None


def without_draws() -> None:
    """Dropout is off, so nothing is drawn from CUDA's random states, which are not there."""
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    moe_utils.te_general_gemm = None  # asked for, but never defined, where Transformer Engine is not installed


def run(kind: Kind, source: Path, out: Path) -> None:
    without_draws()
    resume(kind, source, out)


if __name__ == "__main__":
    without_cuda.pretend()
    torch.set_num_threads(1)
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        out = Path(sys.argv[2]) / name
        out.mkdir(parents=True)
        kind = replace(KINDS[job["kind"]], **job["changes"])
        ranks.run(kind.world, partial(run, kind, Path(job["run"]), out), out / "logs", 120, ranks.join_torch)
