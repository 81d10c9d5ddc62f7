"""Trainings that can be stopped, given another state, and continued: what `lossy.py` restores into.

Everything is deterministic on one thread: the batch of a step depends on the number of the step alone. Needs torch;
the small networks need scikit-learn for its digits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trajectory import Model, Size, corpus

State = dict[str, dict[str, np.ndarray[Any, Any]]]
"""Of each parameter the states, named as in a checkpoint: `fp32`, `exp_avg`, `exp_avg_sq`."""


class Run(ABC):
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    moments: tuple[str, ...] = ()

    @abstractmethod
    def loss(self, step: int) -> Tensor:
        """Of the batch of this step."""

    @abstractmethod
    def validate(self) -> float:
        """The loss on what is never trained on."""

    def before_step(self, step: int) -> None:
        """Set the rate, clip."""
        return

    def train(self, first: int, last: int, shift: int = 0) -> list[float]:
        """Steps `first + 1` to `last`; the loss of each. `shift` takes the data in another order."""
        losses = []
        for step in range(first + 1, last + 1):
            loss = self.loss(step + shift)
            self.optimizer.zero_grad()
            loss.backward()
            self.before_step(step)
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self) -> State:
        return {
            name: {
                "fp32": p.detach().numpy().copy(),
                **{m: self.optimizer.state[p][m].numpy().copy() for m in self.moments},
            }
            for name, p in self.model.named_parameters()
        }

    def buffers(self) -> dict[str, Tensor]:
        return {name: b.clone() for name, b in self.model.named_buffers()}

    def restore(self, state: State, step: int, buffers: dict[str, Tensor] | None = None) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(torch.from_numpy(state[name]["fp32"].copy()))
                if self.moments:
                    kept = {m: torch.from_numpy(state[name][m].copy()) for m in self.moments}
                    self.optimizer.state[p] = {"step": torch.tensor(float(step)), **kept}
            for name, b in self.model.named_buffers():
                b.copy_((buffers or {})[name])


class Gpt(Run):
    """A small GPT on the bytes of Python's library, with AdamW at a cosine from 1e-3."""

    moments = ("exp_avg", "exp_avg_sq")
    _size = Size(vocabulary=256, width=128, layers=4, heads=4, context=128, sequences=16)
    _text: np.ndarray[Any, Any] | None = None
    peak, last, warm_up, horizon, decay = 1e-3, 1e-4, 50, 3000, 0.1

    def __init__(self, beta2: float, seed: int = 1) -> None:
        torch.manual_seed(seed)
        if Gpt._text is None:
            Gpt._text = corpus(self._size).astype(np.int64)
        self.seed, self.model = seed, Model(self._size)
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if p.ndim != 2]
        groups = [{"params": matrices, "weight_decay": self.decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.peak, betas=(0.9, beta2), eps=1e-8)

    def _rows(self, key: list[int], count: int, first: int, last: int) -> Tensor:
        assert self._text is not None
        starts = np.random.default_rng(key).integers(first, last - self._size.context - 1, count)
        return torch.from_numpy(np.stack([self._text[i : i + self._size.context + 1] for i in starts]))

    def loss(self, step: int) -> Tensor:
        assert self._text is not None
        loss: Tensor = self.model(self._rows([self.seed, step], self._size.sequences, 0, self._text.size - 400_000))
        return loss

    @torch.no_grad()
    def validate(self) -> float:
        assert self._text is not None
        rows = self._rows([7], 128, self._text.size - 400_000, self._text.size)
        return float(np.mean([self.model(part).item() for part in rows.split(32)]))

    def before_step(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)

    def rate(self, step: int) -> float:
        if step <= self.warm_up:
            return self.peak * step / self.warm_up
        along = min(1.0, (step - self.warm_up) / (self.horizon - self.warm_up))
        return self.last + (self.peak - self.last) * (1 + math.cos(math.pi * along)) / 2


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def _lenet5() -> nn.Module:
    return nn.Sequential(
        nn.Upsample(28, mode="bilinear"),
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def _alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Upsample(16, mode="bilinear"),
        *(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(24, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


class _Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()),
            *(nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        same = inside == outside and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.short(x))


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Upsample(16, mode="bilinear"),
        *(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(_Residual(16, 16, 1), _Residual(16, 32, 2), _Residual(32, 32, 1)),
        *(_Residual(32, 64, 2), _Residual(64, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "MLP": (_mlp, 0.1),
    "LeNet-5": (_lenet5, 0.05),
    "AlexNet-like": (_alexnet, 0.05),
    "ResNet-like": (_resnet, 0.05),
}


class Digits(Run):
    """A small network on scikit-learn's digits, with plain SGD: the setting of LC-Checkpoint."""

    batch, kept = 32, 1397

    def __init__(self, name: str, seed: int = 3) -> None:
        from sklearn.datasets import load_digits

        torch.manual_seed(seed)
        make, rate = NETWORKS[name]
        self.seed, self.model = seed, make()
        for module in self.model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        self.images = torch.from_numpy((images[order] / 16).astype(np.float32)).view(-1, 1, 8, 8)
        self.labels = torch.from_numpy(labels[order])

    @property
    def epoch(self) -> int:
        return self.kept // self.batch

    def loss(self, step: int) -> Tensor:
        epoch, i = divmod(step - 1, self.epoch)
        rows = np.random.default_rng([self.seed, epoch]).permutation(self.kept)[i * self.batch : (i + 1) * self.batch]
        return F.cross_entropy(self.model(self.images[rows]), self.labels[rows])

    @torch.no_grad()
    def validate(self) -> float:
        self.model.eval()
        loss = F.cross_entropy(self.model(self.images[self.kept :]), self.labels[self.kept :]).item()
        self.model.train()
        return loss
