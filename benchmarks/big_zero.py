"""Make a big real ZeRO checkpoint: `python benchmarks/big_zero.py OUT --gigabytes 1 --stage 1 --dp 2`.

A bf16 model of plain linear layers, AdamW with two parameter groups, one real step by DeepSpeed on a tiny batch.
About 14 bytes per parameter reach the disk: 12 for the master and moments, 2 for the model (at stage 3, where every
rank holds its own part of everything, 12). Prints what it wrote as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))
os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import deepspeed
import torch
from torch import Tensor, nn

from engines import ranks

WIDTH = 2048
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH
BYTES = {1: 14, 2: 14, 3: 12}


class Layer(nn.Module):
    """A residual layer: a matrix to twice the width, one back, and vectors which are not decayed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))) * self.scale)


def train(out: Path, layers: int, stage: int, tag: str) -> None:
    """Called in every rank."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2 * WIDTH * WIDTH},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "foreach": False}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    loss = engine(torch.randn(1, WIDTH)).float().square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(str(out), tag=tag, client_state={"iteration": 1, "universal_checkpoint_info": {}})
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--stage", type=int, choices=BYTES, default=1)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tag", default="global_step1")
    options = parser.parse_args()
    layers = max(1, round(options.gigabytes * 1e9 / BYTES[options.stage] / LAYER))
    out = options.out.resolve()
    logs = out.with_name(out.name + ".logs")
    began = time.monotonic()
    ranks.run(options.dp, lambda: train(out, layers, options.stage, options.tag), logs, timeout=3600)
    files = sorted(file for file in (out / options.tag).rglob("*") if file.is_file())
    peaks = [int(ranks.tail(logs / f"rank{rank}.log").rsplit("peak ", 1)[1].split()[0]) for rank in range(options.dp)]
    report = {
        "checkpoint": str(out / options.tag),
        "parameters": layers * LAYER,
        "bytes": sum(file.stat().st_size for file in files),
        "files": {file.name: file.stat().st_size for file in files},
        "peak_gigabytes_of_all_ranks": round(sum(peaks) * 1024 / 1e9, 2),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
