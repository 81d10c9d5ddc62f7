"""A live training by Megatron core: its own schedules, gradients, optimizers, and checkpoints of its legacy format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed

from megatron_jobs import without_cuda
from megatron_jobs.kinds import KINDS as BF16
from megatron_jobs.resume import without_draws
from megatron_jobs.save import arguments, save_legacy, trained
from recording_jobs.kinds import Kind

SCALER = {"initial_loss_scale": 2.0**21, "hysteresis": 1, "loss_scale_window": 2}
MODELS = {**BF16, **{f"{name}_fp16": replace(BF16[name], dtype="fp16", scaler=SCALER) for name in ("llama", "moe_ep2")}}
LENGTH, BATCH, MICRO_BATCHES, RATE = 12, 2, 2, 1e-2


@dataclass
class MegatronRun:
    """The chunks of this rank, their optimizer and their configuration."""

    kind: Kind
    model: list[Any]
    optimizer: Any
    config: Any
    step: int = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        run = get_forward_backward_func()
        for _ in range(steps):
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            data = [self._batch(number) for number in range(MICRO_BATCHES)]
            of_step = run(
                forward_step_func=_forward,
                data_iterator=[iter(data) for _ in self.model] if len(self.model) > 1 else iter(data),
                model=self.model if len(self.model) > 1 else self.model[0],
                num_microbatches=MICRO_BATCHES,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            self.optimizer.step()
            losses.append(sum(float(one["loss"]) for one in of_step))
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (self.step + 1) / 6)
        return losses

    def _batch(self, number: int) -> Tensor:
        """The tokens of a micro-batch: others at each step, and for each copy of the model."""
        from megatron.core import parallel_state

        place = (self.step * MICRO_BATCHES + number) * 4 + parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(place)
        return torch.randint(64, (BATCH, LENGTH), generator=generator)

    def notes(self) -> dict[str, Any]:
        return {}

    def save(self, folder: Path) -> None:
        args = arguments(MODELS[self.kind.megatron], self.config)
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 2}
        save_legacy(MODELS[self.kind.megatron], self.model, self.optimizer, common, folder)
        distributed.barrier()


def _forward(data: Any, model: Any) -> tuple[Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, mask, labels=tokens), _loss


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def start(kind: Kind) -> MegatronRun:
    without_cuda.pretend()
    without_draws()
    model, optimizer, config = trained(MODELS[kind.megatron], steps=0)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss if kind.dtype == "fp16" else None
    return MegatronRun(kind, model, optimizer, config)
