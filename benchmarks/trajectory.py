"""Train a small GPT for real and keep states of it: `python benchmarks/trajectory.py --out FOLDER`.

Codecs are measured on what training makes, not on random numbers. The text is Python's own library, read from this
machine. Precision is mixed as large trainers have it: bfloat16 weights do the work, gradients of two micro-batches
are summed in float32, AdamW updates float32 masters, and the weights are the masters, rounded.

    pretrain/        states t, t+1, t+2, t+10, t+100 at the learning rate of the schedule (peak 1e-3)
    finetune/        t+1, t+2, t+10, t+100 with the constant rate 2e-5, from the same t
    reinforce/       ... with 3e-6
    bf16-gradients/  t+1, t+2, t+10 at the rate of pre-training, each from one micro-batch, whose gradient is bfloat16

Each state is one file of torch.save, which `ckpt` reads: the model, the optimizer by name, the step. A file that is
there already is not made again; training is deterministic on one thread. Needs torch.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from states import START, default_folder, state_path
from torch import Tensor, nn

SINCE = (1, 2, 10, 100)
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
PEAK, LAST, WARM_UP, HORIZON = 1e-3, 1e-4, 30, 1200
MOST_TEXT = 16_000_000
PIECE = re.compile(r" ?[A-Za-z_]+|\n *| ?[0-9]+| +| ?[^\sA-Za-z0-9_]+|\s")


@dataclass(frozen=True)
class Size:
    """Of the model, and of a step."""

    vocabulary: int = 4096
    width: int = 256
    layers: int = 6
    heads: int = 4
    context: int = 128
    sequences: int = 6
    """In one micro-batch."""


@dataclass(frozen=True)
class Branch:
    """One continuation: at which rate (None: the schedule's), with how many micro-batches a step, saved how far on."""

    name: str
    rate: float | None
    micro_batches: int
    since: tuple[int, ...] = SINCE


PRETRAIN = Branch("pretrain", None, 2)
BRANCHES = (
    PRETRAIN,
    Branch("finetune", 2e-5, 2),
    Branch("reinforce", 3e-6, 2),
    Branch("bf16-gradients", None, 1, SINCE[:3]),
)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        d, self.heads = size.width, size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, d // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, d)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, 0, 0.02 / math.sqrt(2 * size.layers) if into_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss: mean negative log-likelihood of each next token."""
        x = self.token(tokens[:, :-1]) + self.place.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        scores = self.norm(x) @ self.token.weight.T
        return F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())


class Trainer:
    """A model in bfloat16, its masters in float32, and AdamW."""

    def __init__(self, size: Size, text: np.ndarray) -> None:
        torch.manual_seed(1)
        model = Model(size)
        self.size, self.text, self.step = size, text, 0
        self.masters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        self.model = model.bfloat16()
        decayed = [n for n, m in self.masters.items() if m.ndim == 2]
        self.members = [decayed, [n for n in self.masters if n not in decayed]]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [self.masters[n] for n in names], "weight_decay": decay}
                for names, decay in zip(self.members, (DECAY, 0.0), strict=True)
            ],
            lr=PEAK,
            betas=BETAS,
            eps=EPS,
            foreach=False,
        )

    def advance(self, branch: Branch) -> tuple[float, float]:
        """One step; returns loss and rate."""
        self.step += 1
        picks = np.random.default_rng(self.step)  # by the step, so that a run which goes on sees what it would have
        summed = {n: torch.zeros_like(m) for n, m in self.masters.items()}
        loss = 0.0
        for _ in range(branch.micro_batches):
            starts = picks.integers(0, len(self.text) - self.size.context - 1, self.size.sequences)
            rows = np.stack([self.text[i : i + self.size.context + 1] for i in starts]).astype(np.int64)
            part = self.model(torch.from_numpy(rows)) / branch.micro_batches
            part.backward()
            loss += part.item()
            for name, p in self.model.named_parameters():
                assert p.grad is not None
                summed[name] += p.grad.float()
                p.grad = None
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in summed.values()))
        rate = branch.rate if branch.rate is not None else scheduled(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for name, master in self.masters.items():
            master.grad = summed[name] if norm <= CLIP else summed[name] * (CLIP / (norm + 1e-6))
        self.optimizer.step()
        self._round()
        return loss, rate

    def save(self, path: Path) -> None:
        """Appears whole or not at all."""
        state = {n: {"fp32": m.detach(), **self.optimizer.state[m]} for n, m in self.masters.items()}
        groups = [
            {"lr": g["lr"], "betas": BETAS, "eps": EPS, "weight_decay": g["weight_decay"], "params": names}
            for g, names in zip(self.optimizer.param_groups, self.members, strict=True)
        ]
        tree = {
            "model": {n: p.detach() for n, p in self.model.named_parameters()},
            "optimizer": {"state": state, "param_groups": groups},
            "step": self.step,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(tree, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path) -> None:
        tree = torch.load(path, weights_only=True)
        self.step = tree["step"]
        for name, kept in tree["optimizer"]["state"].items():
            master = self.masters[name]
            master.data.copy_(kept.pop("fp32"))
            self.optimizer.state[master] = kept
        self._round()

    def _round(self) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.masters[name])


def scheduled(step: int) -> float:
    """Linear warm-up, then a cosine."""
    if step <= WARM_UP:
        return PEAK * step / WARM_UP
    return LAST + (PEAK - LAST) * (1 + math.cos(math.pi * min(1, (step - WARM_UP) / (HORIZON - WARM_UP)))) / 2


def corpus(size: Size) -> np.ndarray:
    """Python's library in pieces: the most frequent words, and bytes for the others."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    text = "\0".join(path.read_text("utf-8", "ignore") for path in files)[:MOST_TEXT]
    pieces = PIECE.findall(text)
    frequent = collections.Counter(pieces).most_common(size.vocabulary - 256)
    number = {piece: 256 + i for i, (piece, _) in enumerate(frequent)}
    return np.fromiter((token for piece in pieces for token in _tokens(piece, number)), np.uint16)


def _tokens(piece: str, number: dict[str, int]) -> Iterator[int]:
    if piece in number:
        yield number[piece]
    else:
        yield from piece.encode()


def run(out: Path, size: Size, start: int) -> None:
    """Make every state that is not there yet; all branches begin at state `start` of the pre-training."""
    wanted = {b: [start + n for n in b.since if not state_path(out, b.name, start + n).exists()] for b in BRANCHES}
    fork = state_path(out, PRETRAIN.name, start)
    if fork.exists() and not any(wanted.values()):
        return
    text = corpus(size)
    trainer = Trainer(size, text)
    print(f"{sum(m.numel() for m in trainer.masters.values()):,} parameters, {len(text):,} tokens", flush=True)
    if not fork.exists():
        _continue(trainer, PRETRAIN, [start], out)
    for branch, steps in wanted.items():
        if steps:
            trainer.load(fork)
            _continue(trainer, branch, steps, out)


def _continue(trainer: Trainer, branch: Branch, steps: list[int], out: Path) -> None:
    began, first = time.monotonic(), trainer.step
    while trainer.step < max(steps):
        loss, rate = trainer.advance(branch)
        if trainer.step % 20 == 0 or trainer.step in steps:
            pace = (time.monotonic() - began) / (trainer.step - first)
            print(f"{branch.name} {trainer.step}: loss {loss:.3f}, rate {rate:.2g}, {pace:.2f} s a step", flush=True)
        if trainer.step in steps:
            trainer.save(state_path(out, branch.name, trainer.step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=default_folder())
    parser.add_argument("--start", type=int, default=START, help="the step t from which the branches part")
    parser.add_argument("--width", type=int, default=Size.width)
    parser.add_argument("--layers", type=int, default=Size.layers)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    run(given.out, Size(width=given.width, layers=given.layers), given.start)


if __name__ == "__main__":
    main()
