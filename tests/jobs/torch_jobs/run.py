"""A live training by PyTorch's own wrappers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from engines import model as gpt
from torch_jobs import model as llama
from torch_jobs.kinds import Training

RATE = 5e-3
DECAYS = (0.1, 0.0)
"""Weight decay of the matrices, and of the vectors where they have a group of their own."""
EVALUATION = 10_000
"""The step whose batch is kept for evaluation."""

_WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module)(?=\.)")
_CUT: dict[type[nn.Module], dict[str, Any]] = {
    gpt.Gpt: {"mlp.up": ColwiseParallel, "mlp.down": RowwiseParallel},
    llama.Llama: {
        "attention.wq": ColwiseParallel,
        "attention.wk": ColwiseParallel,
        "attention.wv": ColwiseParallel,
        "attention.wo": RowwiseParallel,
        "feed_forward.w1": ColwiseParallel,
        "feed_forward.w2": RowwiseParallel,
        "feed_forward.w3": ColwiseParallel,
    },
}
"""How tensor parallelism cuts the linear layers of each layer."""


@dataclass
class Run:
    """A wrapped model with its optimizer, and how far it has been trained."""

    training: Training
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR | None
    step: int = 0

    def train(self, steps: int) -> list[float]:
        """Train on the batches which follow; the losses, averaged over the ranks."""
        losses = []
        for _ in range(steps):
            tokens, targets = (self._share(part) for part in self._batch(self.step))
            loss = self.model(tokens, targets)
            loss.backward()
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(_mean(loss))
        return losses

    def evaluate(self) -> float:
        """The loss on a whole fixed batch: the same at every degree."""
        self.model.eval()
        with torch.no_grad():
            loss = self.model(*self._batch(EVALUATION))
        self.model.train()
        return _mean(loss)

    def names(self) -> dict[str, nn.Parameter]:
        """Every parameter by each of its names, without those of wrappers."""
        return {plain(name): param for name, param in self.model.named_parameters(remove_duplicate=False)}

    def buffers(self) -> dict[str, Tensor]:
        """The persistent ones."""
        saved = {plain(name) for name in self.model.state_dict()}
        named = {plain(name): buffer for name, buffer in self.model.named_buffers()}
        return {name: buffer for name, buffer in named.items() if name in saved}

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        return gpt.batch(step, gpt.VOCABULARY if self.training.model == "gpt" else llama.VOCABULARY)

    def _share(self, whole: Tensor) -> Tensor:
        """The part of a global batch on which this rank trains, as do those it shares its layers with."""
        return whole.chunk(self.training.dp)[distributed.get_rank() // self.training.tp % self.training.dp]


def start(training: Training, seed: int = 0) -> Run:
    """Build it all; another `seed` gives other weights, frozen ones and buffers included."""
    torch.manual_seed(seed)
    module = _module(training, seed)
    matrices = {name for name, param in module.named_parameters() if param.dim() > 1}
    model = _wrapped(module, training)
    optimizer = _optimizer(training, model, matrices)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20)) if training.scheduler else None
    return Run(training, model, optimizer, scheduler)


def plain(name: str) -> str:
    """The name without those of wrappers."""
    return _WRAPPERS.sub("", name).lstrip(".")


def mesh_of(training: Training) -> DeviceMesh:
    """Replicas, then shards, then tensor parallelism; a dimension of one rank is left out unless it is the only one."""
    sizes = {"replicas": training.replicas, "shards": training.shards, "tp": training.tp}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
    return init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))


def _module(training: Training, seed: int) -> nn.Module:
    kind = gpt.Gpt if training.model == "gpt" else llama.Llama
    module = kind(training.hidden, training.layers, training.tied, training.frozen)
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(gpt.fill(name, tuple(param.shape), seed))
        if seed:
            saved = module.state_dict()
            for name, buffer in module.named_buffers():
                if name in saved:
                    buffer.zero_()
    return module.to(torch.bfloat16) if training.dtype == "bf16" else module


def _wrapped(module: nn.Module, training: Training) -> nn.Module:
    if training.wrapper == "none":
        return module
    if training.wrapper == "ddp":
        return DistributedDataParallel(module)
    layers: Any = module.blocks if isinstance(module, gpt.Gpt) else module.layers
    if training.wrapper == "fsdp1":
        policy = ModuleWrapPolicy({type(layers[0])})
        return FullyShardedDataParallel(
            module, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    mesh = mesh_of(training)
    if training.tp > 1:
        for layer in layers:
            parallelize_module(layer, mesh["tp"], {name: style() for name, style in _CUT[type(module)].items()})
    data = mesh[("replicas", "shards")] if training.replicas > 1 else mesh["shards"]
    for layer in layers:
        fully_shard(layer, mesh=data)
    return fully_shard(module, mesh=data)


def _optimizer(training: Training, model: nn.Module, matrices: set[str]) -> torch.optim.Optimizer:
    # One by one (foreach=False), since lists of tensors must all lie on one mesh, and norms are not on that of `tp`.
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in DECAYS[: training.groups]]
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups[0 if plain(name) in matrices else len(groups) - 1]["params"].append(param)
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, foreach=False)
    amsgrad = training.optimizer == "amsgrad"
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), amsgrad=amsgrad, foreach=False)


def _mean(loss: Tensor) -> float:
    total = loss.detach().double().reshape(())
    distributed.all_reduce(total)
    return total.item() / distributed.get_world_size()
