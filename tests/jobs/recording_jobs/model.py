"""A small decoder of sizes that divide evenly by nothing, which torch's tensor parallelism can cut; and its data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, WORDS, LENGTH, HEADS, INNER = 50, 509, 12, 2, 86
BATCH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """With what is awkward in real ones.

    A parameter of 3 elements, and one of 1; one that has a gradient in every second step only; a frozen table; buffers
    that change in training, a 0-d integer among them; optionally a tied head.
    """

    seen: Tensor
    drift: Tensor

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.gain, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drift", torch.linspace(0.5, 1.5, 5))
        if tied:
            self.head.weight = self.words.weight
        self.positions.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, with_sometimes: bool) -> Tensor:
        if self.training:
            self.seen += 1
            self.drift *= 0.99
        x = self.words(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        if with_sometimes:
            x = x + self.sometimes(x)
        x = self.norm(x) * self.gain.mean() * self.scale * self.drift.mean()
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


class Stage(nn.Module):
    """A half of the decoder, as a stage of a pipeline, under the names that its tensors have in the decoder."""

    seen: Tensor
    drift: Tensor

    def __init__(self, whole: Decoder, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        if is_first:
            self.words, self.positions = whole.words, whole.positions
            self.register_buffer("seen", whole.seen)
            self.blocks = nn.ModuleDict({"0": whole.blocks[0]})
            return
        self.gain, self.scale, self.sometimes = whole.gain, whole.scale, whole.sometimes
        self.norm, self.head = whole.norm, whole.head
        self.register_buffer("drift", whole.drift)
        self.blocks = nn.ModuleDict({"1": whole.blocks[1]})
        self.with_sometimes = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.seen += 1
            return self.blocks["0"](self.words(x[:, :-1]) + self.positions.weight)
        self.drift *= 0.99
        x = self.blocks["1"](x)
        if self.with_sometimes:
            x = x + self.sometimes(x)
        return self.head(self.norm(x) * self.gain.mean() * self.scale * self.drift.mean())


class Expert(nn.Module):
    """The decoder with an expert of this rank, which its own tokens go through, under a name of its own."""

    def __init__(self, whole: Decoder, number: int) -> None:
        super().__init__()
        self.whole = whole
        self.experts = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH)})
        whole.norm.register_forward_pre_hook(lambda _, x: (x[0] + self.experts[str(number)](x[0]),))

    def forward(self, tokens: Tensor, with_sometimes: bool) -> Tensor:
        loss: Tensor = self.whole(tokens, with_sometimes)
        return loss


def batch(step: int) -> Tensor:
    """The global batch of a step: sequences that follow a rule, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(WORDS, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((tokens[-1] * 7 + torch.randint(3, (BATCH,), generator=generator)) % WORDS)
    return torch.stack(tokens, 1)
