"""Load a saved model into stages of torch's pipeline whose layers count from their own first."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ckpt_training import load

WIDTH, LAYERS, MICRO_BATCHES = 6, 4, 2


class Stage(nn.Module):
    """Some layers of the model."""

    def __init__(self, first: int, stop: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(first, stop))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def go_on_in_stages(folder: Path) -> None:
    """Compare a step of two stages with one of the whole model, which rank 0 saves; called in every rank."""
    torch.manual_seed(0)
    rank, each = distributed.get_rank(), LAYERS // 2
    whole, batch = Stage(0, LAYERS), torch.randn(4, WIDTH)
    optimizer = torch.optim.AdamW(whole.parameters(), 0.1, foreach=False)
    step(whole, optimizer, batch)
    if rank == 0:
        torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, folder / "whole.pt")
    distributed.barrier()
    own = Stage(rank * each, (rank + 1) * each)
    own_optimizer = torch.optim.AdamW(own.parameters(), 0.1, foreach=False)

    def in_whole(name: str) -> str:
        """The name of a tensor of this stage in the whole model."""
        layers, number, rest = name.split(".", 2)
        return f"{layers}.{int(number) + rank * each}.{rest}"

    load(folder / "whole.pt", own, own_optimizer, rename=in_whole)
    stage = PipelineStage(own, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=lambda output, target: (output - target).square().mean())
    if rank:
        schedule.step(target=batch)
    else:
        schedule.step(batch)
    own_optimizer.step()
    optimizer.zero_grad()
    step(whole, optimizer, batch)
    states = whole.state_dict()
    differing = [name for name, one in own.state_dict().items() if not torch.equal(one, states[in_whole(name)])]
    (folder / f"rank{rank}.json").write_text(json.dumps(differing))


def step(whole: Stage, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """Train the whole model on the micro-batches of the pipeline."""
    for part in batch.chunk(MICRO_BATCHES):
        ((whole(part) - part).square().mean() / MICRO_BATCHES).backward()
    optimizer.step()
