"""A small recommendation model with real sparse updates: what Check-N-Run and IncrCP are made for. Needs torch.

Three embedding tables are looked up by keys whose frequencies follow Zipf's law, as those of clicks do, and two layers
learn a teacher's answers. Gradients of the tables are sparse: only rows of a batch are stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

State = dict[str, dict[str, np.ndarray[Any, Any]]]
ROWS, WIDTH, BATCH, ZIPF = (300_000, 100_000, 20_000), 32, 512, 1.05

OPTIMIZERS: dict[str, tuple[Callable[[Iterable[Tensor]], torch.optim.Optimizer], tuple[str, ...]]] = {
    "Adagrad": (lambda given: torch.optim.Adagrad(given, lr=0.02), ("sum",)),
    "SparseAdam": (lambda given: torch.optim.SparseAdam(list(given), lr=1e-3), ("exp_avg", "exp_avg_sq")),
    "SGD": (lambda given: torch.optim.SGD(given, lr=0.1), ()),
}


class EmbeddingRun:
    """Deterministic on one thread."""

    def __init__(self, optimizer: str, seed: int = 1) -> None:
        torch.manual_seed(seed)
        make, self.moments = OPTIMIZERS[optimizer]
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH, sparse=True) for rows in ROWS)
        for table in self.tables:
            nn.init.normal_(table.weight, 0, 0.01)  # type: ignore[arg-type]
        self.top = nn.Sequential(nn.Linear(len(ROWS) * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
        self.sparse = make(table.weight for table in self.tables)  # type: ignore[misc]
        self.dense = torch.optim.Adagrad(self.top.parameters(), lr=0.02)
        self.random = np.random.default_rng(seed)
        self.chances = [np.cumsum(np.arange(1, rows + 1) ** -ZIPF) for rows in ROWS]
        self.shuffles = [self.random.permutation(rows) for rows in ROWS]  # frequent keys are anywhere in a table
        self.teacher = [self.random.normal(0, 1, rows).astype(np.float32) for rows in ROWS]
        self.step = 0

    def train(self, steps: int) -> float:
        """So many more steps; the loss of the last one."""
        loss = torch.zeros(())
        for _ in range(steps):
            keys = []
            for chances, shuffle in zip(self.chances, self.shuffles, strict=True):
                keys.append(shuffle[np.searchsorted(chances, self.random.random(BATCH) * chances[-1])])
            scores = sum(teacher[key] for teacher, key in zip(self.teacher, keys, strict=True))
            wanted = torch.from_numpy((scores + self.random.normal(0, 1, BATCH) > 0).astype(np.float32))
            looked = [table(torch.from_numpy(key)) for table, key in zip(self.tables, keys, strict=True)]
            loss = nn.functional.binary_cross_entropy_with_logits(self.top(torch.cat(looked, 1)).squeeze(1), wanted)
            for optimizer in (self.sparse, self.dense):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (self.sparse, self.dense):
                optimizer.step()
            self.step += 1
        return float(loss.detach())

    def state(self) -> State:
        """Of each table, weights and moments: (rows, 32) float32."""
        tables: State = {}
        for number, table in enumerate(self.tables):
            kept = self.sparse.state[table.weight]
            moments = {name: kept[name].detach().numpy().copy() for name in self.moments}
            tables[f"table{number}"] = {"fp32": table.weight.detach().numpy().copy(), **moments}  # type: ignore[union-attr]
        return tables
