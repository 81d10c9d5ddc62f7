"""The plain tiny model, and the weights and data that every kind starts from.

Weights depend on the name of the parameter alone and data on the number of the step alone, so every parallel layout
trains the same model.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
HEADS = 4
LENGTH = 16
BATCH = 12

_LOCAL_EXPERT = re.compile(r"(?<=deepspeed_experts\.)\d+")


def fill(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """The initial value of a parameter: small noise, about one for the weights of norms and other vectors."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode())))
    if len(shape) > 1:
        return noise * 0.05
    return noise * 0.01 if name.endswith("bias") else 1 + noise * 0.01


def batch(step: int, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """The global batch of a step: sequences which mostly follow a rule, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(vocabulary, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        noise = torch.randint(vocabulary, (BATCH,), generator=generator)
        follows = torch.rand(BATCH, generator=generator) < 0.9
        tokens.append(torch.where(follows, (tokens[-1] * 7 + 1) % vocabulary, noise))
    text = torch.stack(tokens, 1)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def global_expert(name: str, first: int) -> str:
    """The name of an expert's parameter among all experts, where this rank's first expert is number `first`."""
    return _LOCAL_EXPERT.sub(lambda local: str(first + int(local[0])), name)


class Attention(nn.Module):
    """Causal attention; as many heads as the width it is given holds, so it also runs on a tensor-parallel shard."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.width = hidden // HEADS
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out = self.mlp(self.norm2(x))
        return x + (out[0] if isinstance(out, tuple) else out)


class Gpt(nn.Module):
    """A decoder with the awkward things real models have.

    Parameters of odd size and of one element; integer and float buffers which change in training and are persistent;
    a buffer which is not persistent; optionally a tied head and a frozen table.
    """

    drift: Tensor
    places: Tensor
    seen: Tensor
    softness: Tensor

    def __init__(
        self,
        hidden: int,
        layers: int,
        tied: bool = False,
        frozen: bool = False,
        mlp: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Embedding(LENGTH, hidden)
        self.odd = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block(hidden, mlp(layer) if mlp else Mlp(hidden)) for layer in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.register_buffer("places", torch.arange(LENGTH).flip(0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drift", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("softness", torch.tensor(1 / math.sqrt(hidden)), persistent=False)
        if tied:
            self.head.weight = self.word.weight
        self.position.weight.requires_grad_(not frozen)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.drift *= 0.97
        x = self.word(tokens) + self.position(self.places[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.odd.mean() * self.scale * self.drift.mean() * (1 + self.softness)
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())
