"""Write the golden log of layout version 3: `python sample_checkpoints/make_recording_3.py`, with torch.

`recorded-3/run.chain` is a run of one process as the recorder wrote it, whose gradients are rounded to `int8`: those of
a matrix with rows and columns of different magnitudes are split into classes. `recorded-3/expected.json` has for each
step the XXH3-128 of the weights and moments of each tensor. They are those of a second model, which torch steps on
gradients that NumPy has rounded here as docs/codecs.md states; so nothing of the log is in them.
A golden file of a released version is never written again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from ckpt_recorder import Recorder

TARGET = Path(__file__).resolve().parent / "recorded-3"
STEPS, BLOCK = 6, 512


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 96, bias=False)  # small tensors would share blocks

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(values)
        return result


def rounded(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as the log has it: in blocks, each value the nearest multiple of the scale of its block."""
    values = gradient.reshape(-1).numpy()
    result = np.zeros_like(values)
    for begin in range(0, values.size, BLOCK):
        block = values[begin : begin + BLOCK]
        scale = np.float32(np.float64(np.abs(block).max()) / 127).view(np.uint32)
        scale = ((scale + np.uint32(0xFF)) & ~np.uint32(0xFF)).view(np.float32)
        result[begin : begin + BLOCK] = np.rint(block.astype(np.float64) * (1 / np.float64(scale))) * scale
    return torch.from_numpy(result).reshape(gradient.shape)


def optimizer_of(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)


def expected(net: Net, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What must be restored: of each tensor, the hash of its weights and moments, in the order of their names."""
    tensors = dict[str, str]()
    for name, tensor in net.named_parameters():
        states = {"param": tensor.detach(), **optimizer.state.get(tensor, {})}
        hasher = xxhash.xxh3_128()
        for state in sorted(states.keys() - {"step"}):
            if state == "param" or states[state].any():
                hasher.update(states[state].numpy().tobytes())
        tensors[name] = hasher.hexdigest()
    return {"step": step, "tensors": tensors}


def record(run: Path) -> list[dict[str, Any]]:
    """Train and record. Returns what must be restored of each step."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    net = Net()
    twin = deepcopy(net)
    optimizer, other = optimizer_of(net), optimizer_of(twin)
    columns, rows = torch.logspace(-2, 0, 64), torch.logspace(-2, 0, 96)
    wanted = [expected(twin, other, 0)]
    with Recorder(net, optimizer, run, codec="int8"):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            (net(torch.randn(16, 64) * columns) * rows).square().mean().backward()
            for one, same in zip(net.parameters(), twin.parameters(), strict=True):
                assert one.grad is not None
                same.grad = rounded(one.grad)
            optimizer.step()
            other.step()
            wanted.append(expected(twin, other, step))
    return wanted


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch, "run.chain")
        wanted = record(run)
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(run, TARGET / "run.chain", ignore=shutil.ignore_patterns("chain.lock"))
    lines = ",\n".join(json.dumps(one) for one in wanted)
    (TARGET / "expected.json").write_text(f"[\n{lines}\n]\n")
    nbytes = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    print(f"{TARGET.name}: {len(wanted)} steps, {nbytes:,} bytes")


if __name__ == "__main__":
    main()
