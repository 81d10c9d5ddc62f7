"""Small runs of each engine at each degree, and all their values, gathered by the engines' own functions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, BLOCKS, VOCABULARY, BUFFER = 48, 2, 131, "seen"
MOMENTS = ("exp_avg", "exp_avg_sq")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + scores


class Model(nn.Module):
    """With an untied head and a persistent buffer, which nothing computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer(BUFFER, torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens)
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


@dataclass(frozen=True)
class Target:
    """An engine at a degree."""

    engine: str
    world: int
    form: str = ""

    def __str__(self) -> str:
        return f"{self.engine}{'-' if self.form else ''}{self.form}@{self.world}"

    @property
    def is_zero(self) -> bool:
        return self.engine.startswith("zero")


TARGETS = (
    Target("plain", 1),
    Target("ddp", 2),
    Target("fsdp1", 2),
    Target("fsdp1", 2, "flat"),  # use_orig_params=False
    *(Target("fsdp2", world) for world in (1, 2, 3, 4, 8)),
    Target("fsdp2", 2, "bf16"),  # mixed precision
    Target("fsdp2", 2, "meta"),  # built on the meta device
    Target("hsdp", 4),
    Target("tp", 4),
    Target("ddp", 2, "shared"),  # replicas read a share each
    Target("hsdp", 4, "shared"),
    Target("stages", 2),  # each rank has the modules of its own stage
    Target("fsdp1", 3),
    Target("zero3", 3),
    *(Target(f"zero{stage}", world) for stage in (1, 2, 3) for world in (1, 2, 4)),
)


class Run:
    """A model and its optimizer in this rank; a DeepSpeed engine has its own."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        torch.manual_seed(seed)
        with torch.device("meta" if target.form == "meta" else "cpu"):
            model = Model()
        if target.form != "meta":
            model.get_buffer(BUFFER).add_(seed + 0.5)
        self.model: Any = self._sharded(model)
        self.optimizer: Any = None
        if not target.is_zero:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, weight_decay=0.1, fused=True)

    def _sharded(self, model: Model) -> Any:
        target = self.target
        if target.engine == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if target.engine == "fsdp1":
            policy, orig = ModuleWrapPolicy({Block}), target.form != "flat"
            cpu = torch.device("cpu")
            return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=orig, device_id=cpu)
        if target.engine in ("fsdp2", "hsdp", "tp"):
            return self._fully_sharded(model)
        if target.engine == "stages":
            return _own_stage(model, distributed.get_rank())
        if target.is_zero:
            return _deepspeed(model, int(target.engine.removeprefix("zero")))
        return model

    def _fully_sharded(self, model: Model) -> nn.Module:
        options: dict[str, Any] = {}
        world = self.target.world
        if self.target.form == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if self.target.engine == "hsdp":
            options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
        if self.target.engine == "tp":
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            options["mesh"] = mesh["dp"]
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model

    def train(self, steps: range) -> list[float]:
        """Train these steps and return this rank's losses: none of stages. Ranks have data of their own."""
        return [] if self.target.engine == "stages" else [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        rank = distributed.get_rank() // (2 if self.target.engine == "tp" else 1)
        generator = torch.Generator().manual_seed(1000 + 64 * step + rank)
        tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
        scores = self.model(tokens[:, :-1]).reshape(-1, VOCABULARY).float()
        loss = nn.functional.cross_entropy(scores, tokens[:, 1:].reshape(-1))
        if self.optimizer is None:
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def values(self, with_moments: bool) -> Iterator[tuple[str, str, torch.Tensor]]:
        """All full values: names, states and tensors; counts of steps are states. Every rank must call it."""
        if self.target.is_zero:
            yield from _deepspeed_values(self.model, with_moments)
            return
        options = torch_states.StateDictOptions(full_state_dict=True)
        weights = torch_states.get_model_state_dict(self.model, options=options)
        for name, value in weights.items():
            yield name, "weight", value
        if with_moments:
            tree: Any = torch_states.get_optimizer_state_dict(self.model, self.optimizer, options=options)["state"]
            for name, states in tree.items():
                for state in (*MOMENTS, "step"):
                    yield name, state, states[state]


def _own_stage(model: Any, rank: int) -> Any:
    """Without the modules of the other stage. Those of this one have the names that they have in the full model."""
    model.blocks = nn.ModuleDict({str(rank): model.blocks[rank]})
    if rank == 0:
        del model.head
    else:
        del model.word
    return model


def _deepspeed(model: Model, stage: int) -> Any:
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def _deepspeed_values(engine: Any, with_moments: bool) -> Iterator[tuple[str, str, torch.Tensor]]:
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    steps = {float(state["step"]) for state in engine.optimizer.optimizer.state.values() if "step" in state}
    for name, parameter in engine.module.named_parameters():
        yield name, "master", safe_get_full_fp32_param(parameter)
        if with_moments:
            for state in MOMENTS:
                yield name, state, safe_get_full_optimizer_state(parameter, state)
            yield name, "step", torch.tensor(sorted(steps)).squeeze()
        if hasattr(parameter, "ds_id"):
            with zero.GatheredParameters([parameter]):
                yield name, "weight", parameter.detach().clone()
        else:
            yield name, "weight", parameter.detach()
    for name, buffer in engine.module.named_buffers():
        yield name, "weight", buffer.detach()
