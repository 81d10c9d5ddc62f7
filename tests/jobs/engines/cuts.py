"""How tensor parallelism cuts a parameter: the tests' own rules, independent of those under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """A parameter made of parts along `dim`, each of which is divided evenly among the ranks.

    `parts` are proportions: (2, 1, 1) is a query as wide as key and value together. `rows` is the true size of
    dimension 0 where the ranks hold padding after it.
    """

    dim: int
    parts: tuple[int, ...] = (1,)
    rows: int | None = None

    def widths(self, size: int) -> list[int]:
        """How many of `size` rows or columns belong to each part."""
        return [size * part // sum(self.parts) for part in self.parts]

    def split(self, full: Tensor, ranks: int, rank: int) -> Tensor:
        """The piece of a rank."""
        parts = full.split(self.widths(full.shape[self.dim]), self.dim)
        return torch.cat([part.chunk(ranks, self.dim)[rank] for part in parts], self.dim)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`, padding removed."""
        parts = [piece.split(self.widths(piece.shape[self.dim]), self.dim) for piece in pieces]
        full = torch.cat([piece[i] for i in range(len(self.parts)) for piece in parts], self.dim)
        return full[: self.rows] if self.rows is not None else full


WHOLE = None
VOCABULARY = 250
MEGATRON = {
    "word.weight": Cut(0, rows=VOCABULARY),
    "qkv.weight": Cut(0, (2, 1, 1)),
    "qkv.bias": Cut(0, (2, 1, 1)),
    "out.weight": Cut(1),
    "gate_up.weight": Cut(0, (1, 1)),
    "gate_up.bias": Cut(0, (1, 1)),
    "down.weight": Cut(1),
}
AUTOTP = {
    "qkv.weight": Cut(0, (1, 1, 1)),
    "qkv.bias": Cut(0, (1, 1, 1)),
    "out.weight": Cut(1),
    "up.weight": Cut(0),
    "up.bias": Cut(0),
    "down.weight": Cut(1),
}


def cut_of(name: str, table: dict[str, Cut]) -> Cut | None:
    """The rule for a parameter; None where every rank holds all of it."""
    return table.get(".".join(name.split(".")[-2:]), WHOLE)
