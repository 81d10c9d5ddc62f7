"""A small decoder of Llama's kind, whose sizes do not divide evenly, and which torch's tensor parallelism can cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.model import LENGTH

VOCABULARY = 251
HEADS = 4
INNER = 86


class Attention(nn.Module):
    """Causal attention whose queries share keys and values in pairs; it also runs on a shard of the heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.width = hidden // HEADS
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk = nn.Linear(hidden, hidden // 2, bias=False)
        self.wv = nn.Linear(hidden, hidden // 2)
        self.wo = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, INNER, bias=False)
        self.w2 = nn.Linear(INNER, hidden, bias=False)
        self.w3 = nn.Linear(hidden, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden)
        self.ffn_norm = nn.RMSNorm(hidden)
        self.feed_forward = FeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The decoder, and what is awkward in real ones.

    A parameter of 3 elements, so that the fourth of four ranks has none, and one of 1; buffers that change in training,
    a 0-d integer among them; buffers whose strides are not those of C; optionally a tied head and a frozen table.
    """

    seen: Tensor
    drift: Tensor
    slopes: Tensor
    window: Tensor

    def __init__(self, hidden: int, layers: int, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(LENGTH, hidden)
        self.gain = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.output = nn.Linear(hidden, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drift", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("slopes", torch.linspace(0.5, 1.5, 12).reshape(3, 4).t())
        window = torch.linspace(0.5, 1.5, 60).reshape(1, 3, 4, 5)
        self.register_buffer("window", window.to(memory_format=torch.channels_last))
        if tied:
            self.output.weight = self.tok_embeddings.weight
        self.positions.weight.requires_grad_(not frozen)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.drift *= 0.97
        x = self.tok_embeddings(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        # Weighted sums, so that a transposed buffer changes the loss.
        weights = torch.arange(12, dtype=self.slopes.dtype)
        bias = (self.slopes.reshape(-1) * weights).mean() * self.window.flatten()[:12].dot(weights) / 100
        x = self.norm(x) * self.gain.mean() * self.scale * self.drift.mean() * (1 + bias / 100)
        return functional.cross_entropy(self.output(x).float().flatten(0, 1), targets.flatten())
