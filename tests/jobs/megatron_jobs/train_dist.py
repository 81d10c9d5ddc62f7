"""Real Megatron core trains on from distributed checkpoints: `train_dist.py JOBS OUT`.

A job has the fields of `resume.py`, and `steps`. It may be of files that Megatron wrote for other numbers of ranks,
which it reshards itself while it loads them. Each job makes OUT/NAME with

    losses.json      the loss of each step, as Megatron computes it, predictions of further tokens included
    trained/         what Megatron saves after the last step
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from engines import ranks
from megatron_jobs import without_cuda
from megatron_jobs.kinds import KINDS, Kind
from megatron_jobs.resume import INPUT, without_draws
from megatron_jobs.resume_dist import keep_steps, load
from megatron_jobs.save import arguments, save_dist, trained


def train(kind: Kind, run: Path, steps: int, out: Path) -> None:
    without_draws()
    wrapped, optimizer, config = trained(kind, steps=1)
    with torch.no_grad():
        for model in wrapped:
            for parameter in model.module.parameters():
                parameter.add_(1.0)
    load(kind, wrapped, optimizer, run, with_random_states=False)
    losses = [train_step(kind, wrapped, optimizer, number) for number in range(steps)]
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        number = parallel_state.get_data_parallel_rank()
        (out / f"losses{number or ''}.json").write_text(json.dumps(losses))
    common = {"args": arguments(kind, config), "checkpoint_version": 3.0, "iteration": 2}
    save_dist(wrapped, optimizer, common, out / "trained", "dp_reshardable", kind.wrapped)


def train_step(kind: Kind, wrapped: list[Any], optimizer: Any, number: int) -> str | None:
    """The loss of one step, in hexadecimal. Stages hand on what they compute, and its gradients."""
    (model,) = wrapped
    stage, group = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_group()
    # With tensor parallelism, Megatron trains experts only with sequence parallelism, which gloo does not have.
    model.train(kind.tp == 1)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    tokens = INPUT.roll(number + 5 * parallel_state.get_data_parallel_rank(), 1)
    length, hidden = INPUT.shape[1], kind.model["hidden_size"]
    positions = torch.arange(length).expand(*INPUT.shape)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    received = None
    if stage:
        received = torch.empty(length, len(INPUT), hidden, dtype=next(model.parameters()).dtype)
        torch.distributed.recv(received, group=group, group_src=stage - 1)
        model.module.set_input_tensor([received.requires_grad_()])
    is_last = stage == kind.pp - 1
    result = model(tokens, positions, mask, labels=tokens.roll(-1, 1) if is_last else None)
    if is_last:
        loss = result.float().mean()
        loss.backward()
    else:
        torch.distributed.send(result.detach().contiguous(), group=group, group_dst=stage + 1)
        gradients = torch.empty_like(result)
        torch.distributed.recv(gradients, group=group, group_src=stage + 1)
        result.backward(gradients)
    if received is not None:
        assert received.grad is not None
        torch.distributed.send(received.grad.contiguous(), group=group, group_dst=stage - 1)
    finalize_model_grads(wrapped)
    optimizer.step()
    return float(loss.detach()).hex() if is_last else None


if __name__ == "__main__":
    without_cuda.pretend()
    keep_steps()
    torch.set_num_threads(1)
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        out = Path(sys.argv[2]) / name
        out.mkdir(parents=True)
        kind = replace(KINDS[job["kind"]], **job["changes"])
        work = partial(train, kind, Path(job["run"]), job["steps"], out)
        ranks.run(kind.world, work, out / "logs", 120, ranks.join_torch)
