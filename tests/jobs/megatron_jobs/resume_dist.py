"""Real Megatron core goes on from distributed checkpoints: `resume_dist.py JOBS OUT`, as `resume.py` from legacy ones.

Every key that Megatron asks for must be there, and no other. Each job makes OUT/NAME with

    logits.pt        what the model computes, whole
    loaded/          what Megatron saves at once
    stepped/         what it saves after one more step, whose gradients depend on the weights alone
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
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from engines import ranks
from megatron_jobs import without_cuda
from megatron_jobs.kinds import KINDS, Kind
from megatron_jobs.resume import logits_of, without_draws
from megatron_jobs.save import arguments, random_states, save_dist, trained


def resume(kind: Kind, run: Path, out: Path) -> None:
    without_draws()
    wrapped, optimizer, config = trained(kind, steps=1)
    with torch.no_grad():
        for model in wrapped:
            for parameter in model.module.parameters():
                parameter.add_(1.0)
    load(kind, wrapped, optimizer, run)
    logits = logits_of(kind, [model.module for model in wrapped])
    if logits is not None:
        torch.save(logits, out / "logits.pt")
    common = {"args": arguments(kind, config), "checkpoint_version": 3.0, "iteration": 2}
    encoding = "dp_reshardable" if kind.distributed else None
    save_dist(wrapped, optimizer, common, out / "loaded", encoding, kind.wrapped)
    for model in wrapped:
        for parameter in model.module.parameters():
            parameter.main_grad.copy_(parameter.detach().float() * 0.5)
    optimizer.step()
    save_dist(wrapped, optimizer, common, out / "stepped", encoding, kind.wrapped)


def keep_steps() -> None:
    """Without Transformer Engine, Adam is PyTorch's, which counts steps for each parameter, in a tensor, in place.

    Megatron loads the count with the groups, as one tensor for all; and then asks for it among the states of each
    parameter, where it never is.
    """
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, number = self.model_param_group_index_map[parameter]
        own = self.optimizer.state[self.optimizer.param_groups[group]["params"][number]]
        own["step"] = own["step"].clone()
        put(self, parameter, {**tensors, "step": own["step"].clone()})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def load(kind: Kind, wrapped: list[Any], optimizer: Any, run: Path, *, with_random_states: bool = True) -> None:
    """As megatron.training loads the format `torch_dist`. Random states are those of equally many ranks only."""
    folder = str(run / f"iter_{int((run / 'latest_checkpointed_iteration.txt').read_text()):07d}")
    common = dist_checkpointing.load_common_state_dict(folder)
    saved_arguments = common["args"]
    degrees = (saved_arguments.tensor_model_parallel_size, saved_arguments.pipeline_model_parallel_size)
    assert degrees == (kind.tp, kind.pp) or not with_random_states
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    models = wrapped if kind.wrapped else [model.module for model in wrapped]
    names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    requested: dict[str, Any] = {
        name: model.sharded_state_dict(metadata=metadata) for name, model in zip(names, models, strict=True)
    }
    # Optimizer after model: it takes the places of its states from the model's.
    requested["optimizer"] = optimizer.sharded_state_dict(dict(requested), is_loading=True, metadata=metadata)
    if with_random_states:
        requested["rng_state"] = random_states(None)
    strict = StrictHandling.RAISE_ALL if with_random_states else StrictHandling.RAISE_UNEXPECTED
    state = dist_checkpointing.load(requested, folder, strict=strict)
    for name, model in zip(names, wrapped, strict=True):
        weights = {key.removeprefix("module."): value for key, value in state[name].items()}
        model.module.load_state_dict(weights, strict=True)
    optimizer.load_state_dict(state["optimizer"])
    if with_random_states:
        (own,) = state["rng_state"]
        torch.set_rng_state(own["torch_rng_state"])


if __name__ == "__main__":
    without_cuda.pretend()
    keep_steps()
    torch.set_num_threads(1)
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        out = Path(sys.argv[2]) / name
        out.mkdir(parents=True)
        kind = replace(KINDS[job["kind"]], **job["changes"])
        ranks.run(kind.world, partial(resume, kind, Path(job["run"]), out), out / "logs", 120, ranks.join_torch)
