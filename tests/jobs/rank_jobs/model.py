"""A tiny model with what per-rank files find hard.

Sizes that no number of ranks divides, a vector shorter than the ranks are many, a frozen parameter, and buffers, one of
them a vector. Weights depend on names and data on the step and the rank, so that ranks must reduce to agree.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 12
VOCABULARY = 29


class Block(nn.Module):
    """Up, down, and a gain of three values."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x))) * self.gain.sum()


class Tiny(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, inner: int, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        if tied:
            self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(not frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += tokens.numel()
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def filled(inner: int, tied: bool, frozen: bool) -> Tiny:
    """The model with its first weights."""
    model = Tiny(inner, tied, frozen)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.add_(torch.randn(parameter.shape, generator=seed) * 0.05)
    return model


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Of the batch of a step and a rank."""
    tokens = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1000 * step + rank))
    return functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 7 + 1).flatten() % VOCABULARY)
