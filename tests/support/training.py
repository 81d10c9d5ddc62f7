"""A small model that real PyTorch trains, saved every step by `torch.save`, by DCP and by nobody else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from damage import ckpt

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "rmsprop": lambda given: torch.optim.RMSprop(given, lr=1e-3, centered=True),
}


class Net(nn.Module):
    """With a buffer that counts, and one tensor of more elements than a chunk has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(700, 400)
        self.norm = nn.BatchNorm1d(400)
        self.head = nn.Linear(400, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return result


def save_run(folder: Path, steps: int, optimizer: str = "adamw", form: str = "torch") -> list[Path]:
    """Train, and save the state after each step; the paths."""
    torch.manual_seed(1)
    net = Net()
    stepping = OPTIMIZERS[optimizer](net.parameters())
    saved = []
    for step in range(1, steps + 1):
        tokens, wanted = torch.randint(700, (64,)), torch.randint(7, (64,))
        stepping.zero_grad()
        nn.functional.cross_entropy(net(tokens), wanted).backward()
        stepping.step()
        saved.append(_save(folder / f"step{step}", step, net, stepping, form))
    return saved


def chained(folder: Path, steps: int, optimizer: str = "adamw") -> Path:
    """The folder, with a run of so many states in it, `step1` and on, and their chain, `run`."""
    for path in save_run(folder, steps, optimizer):
        assert ckpt("append", folder / "run", path).code == 0
    return folder


def _save(path: Path, step: int, net: Net, optimizer: torch.optim.Optimizer, form: str) -> Path:
    rest = {"step": step, "rng": torch.get_rng_state(), "schedule": {"last": step, "warm": (1, 2)}}
    if form == "torch":
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), **rest}, path)
        return path
    names = [name for name, _ in net.named_parameters()]
    kept = optimizer.state_dict()
    named = {"state": {names[i]: state for i, state in kept["state"].items()}}
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in kept["param_groups"]]
    import dcp_states  # torch.distributed.tensor takes a second

    return dcp_states.save({"model": net.state_dict(), "optim": {**named, "param_groups": groups}, **rest}, path)
