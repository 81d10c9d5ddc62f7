"""A live training run of one kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, distributed, nn

from engines import model
from engines.config import DECAYS, RATE, config
from engines.cuts import VOCABULARY
from engines.kinds import Kind
from engines.lion import Lion
from engines.megatron import Megatron, Mesh, pipeline

EVALUATION = 10_000
"""The step whose batch is kept for evaluation."""


@dataclass
class Run:
    """An engine, and where this process stands in it."""

    kind: Kind
    engine: Any
    mesh: Mesh
    names: dict[int, str]
    """The name of each parameter, local to this rank, by the parameter's identity."""

    @property
    def first_expert(self) -> int:
        """The number, among all experts, of this rank's first."""
        return self.mesh.dp_rank % self.kind.ep * (self.kind.experts // self.kind.ep)

    def train(self, steps: int) -> list[float]:
        """Train on the batches which follow; the losses, averaged over the ranks."""
        losses = []
        for _ in range(steps):
            step = self.engine.global_steps
            if self.kind.pipeline:
                loss = self.engine.train_batch(self._micro_batches(step, shared=True))
            else:
                tokens, targets = self._batch(step)
                loss = self.engine(_share(tokens, self.mesh), _share(targets, self.mesh))
                self.engine.backward(loss)
                self.engine.step()
            losses.append(self._mean(loss))
        return losses

    def evaluate(self) -> float:
        """The loss on a whole fixed batch: the same at every data-parallel degree."""
        self.engine.eval()
        with torch.no_grad():
            if self.kind.pipeline:
                # Stages agree on the shape of what they exchange once, and these micro-batches are larger.
                self.engine.reset_activation_shape()
                loss = self.engine.eval_batch(self._micro_batches(EVALUATION, shared=False))
                self.engine.reset_activation_shape()
            else:
                loss = self.engine(*self._batch(EVALUATION))
        self.engine.train()
        return self._mean(loss)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        return model.batch(step, VOCABULARY if self.kind.model == "megatron" else model.VOCABULARY)

    def _micro_batches(self, step: int, shared: bool) -> Iterator[tuple[Tensor, Tensor]]:
        tokens, targets = (_share(part, self.mesh) if shared else part for part in self._batch(step))
        count = self.engine.gradient_accumulation_steps()
        return zip(tokens.chunk(count), targets.chunk(count), strict=True)

    def _mean(self, loss: Tensor) -> float:
        total = loss.detach().double().reshape(())
        distributed.all_reduce(total)
        return total.item() / distributed.get_world_size()


def start(kind: Kind, seed: int = 0, universal: bool = False) -> Run:
    """Build the engine of a kind; another `seed` gives other weights, frozen ones and buffers included."""
    torch.manual_seed(0)
    if kind.dtype == "fp16":
        # DeepSpeed refuses a processor without fp16 instructions; torch computes in fp16 on any.
        get_accelerator().is_fp16_supported = lambda: True
    mesh = Mesh.of(kind)
    run = Run(kind, None, mesh, {})
    module = _module(run, seed)
    run.names = {id(param): name for name, param in module.named_parameters()}
    groups = _groups(kind, module)
    given: dict[str, Any] = {"model_parameters": groups}
    if kind.optimizer == "own-lion":
        given = {"optimizer": Lion(groups, RATE / 5, (0.9, 0.99), DECAYS[0])}
    if kind.model == "megatron" and not kind.pipeline:
        given["mpu"] = mesh
    run.engine, *_ = deepspeed.initialize(model=module, config=config(kind, universal), **given)
    # AutoTP replaces parameters by their shards.
    run.names |= {id(param): name for name, param in run.engine.module.named_parameters()}
    return run


def _share(whole: Tensor, mesh: Mesh) -> Tensor:
    """The part of a global batch which this data-parallel rank trains on."""
    return whole.chunk(mesh.dp)[mesh.dp_rank]


def _module(run: Run, seed: int) -> nn.Module:
    kind, mesh = run.kind, run.mesh
    if kind.pipeline:
        return pipeline(mesh, kind, seed)
    if kind.model == "megatron":
        return Megatron(mesh, kind, seed)

    def mlp(layer: int) -> nn.Module:
        plain = model.Mlp(kind.hidden)
        if not kind.experts or layer % 2 == 0:
            return plain
        options = {"capacity_factor": 4.0, "eval_capacity_factor": 4.0, "use_rts": False}
        return MoE(kind.hidden, plain, num_experts=kind.experts, ep_size=kind.ep, k=1, **options)

    module = model.Gpt(kind.hidden, kind.layers, kind.tied, kind.frozen, mlp)
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(model.fill(model.global_expert(name, run.first_expert), tuple(param.shape), seed))
        if seed:
            saved = module.state_dict()
            for name, buffer in module.named_buffers():
                if name in saved:
                    buffer.zero_()
    return module


def _groups(kind: Kind, module: nn.Module) -> list[dict[str, Any]]:
    """Matrices, then vectors, then embeddings: as many of these groups as the kind has, the rest in the first."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay, "name": f"group{i}"} for i, decay in enumerate(DECAYS[: kind.groups])
    ]
    for name, param in module.named_parameters():
        place = 2 if "word" in name or "position" in name else int(param.dim() < 2)
        if param.requires_grad:
            groups[place if place < kind.groups else 0]["params"].append(param)
    groups = [group for group in groups if group["params"]]
    return split_params_into_different_moe_groups_for_optimizer(groups) if kind.experts else groups
