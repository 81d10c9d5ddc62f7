"""Recorded steps of a training: the bfloat16 weights after each, as `benchmarks/policy_runs.py` writes them.

A folder has `run.json` (names and shapes in order), `first.npy` (all weights before the first step as uint16, one
tensor after another), and `steps/000001`, ...: a hash of the weights after the step, and what changed, by zlib.
Imports no torch.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
HASH_NBYTES = 16


def default_runs() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt-runs"


@dataclass(frozen=True)
class WeightRun:
    """A recorded run. Its weights are flat arrays of uint16, the bits of bfloat16."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, folder: Path) -> WeightRun:
        header = json.loads((folder / "run.json").read_text("utf-8"))
        return cls(folder, {name: tuple(shape) for name, shape in header["shapes"]})

    @classmethod
    def create(cls, folder: Path, shapes: Mapping[str, tuple[int, ...]], first: Array, **facts: object) -> WeightRun:
        (folder / "steps").mkdir(parents=True, exist_ok=True)
        np.save(folder / "first.npy", first)
        header = {"shapes": [[name, list(shape)] for name, shape in shapes.items()], **facts}
        (folder / "run.json").write_text(json.dumps(header, indent=1), "utf-8")
        return cls(folder, dict(shapes))

    @property
    def steps(self) -> int:
        """How many steps are there, from 1."""
        return sum(not path.name.endswith(".tmp") for path in (self.folder / "steps").iterdir())

    def add(self, step: int, before: Array, after: Array) -> None:
        changed = np.flatnonzero(before != after)
        gaps = np.diff(changed, prepend=0).astype("<u4")
        path = self.folder / "steps" / f"{step:06d}"
        data = xxhash.xxh3_128_digest(after) + zlib.compress(gaps.tobytes() + after[changed].tobytes(), 1)
        path.with_suffix(".tmp").write_bytes(data)
        path.with_suffix(".tmp").replace(path)

    def states(self) -> Iterator[tuple[int, Array]]:
        """Yield step and weights from step 0, each in an array of its own, compared with its hash."""
        weights = np.load(self.folder / "first.npy")
        yield 0, weights
        for step in range(1, self.steps + 1):
            data = (self.folder / "steps" / f"{step:06d}").read_bytes()
            raw = zlib.decompress(data[HASH_NBYTES:])
            count = len(raw) // 6
            weights = weights.copy()
            weights[np.cumsum(np.frombuffer(raw, "<u4", count), dtype=np.int64)] = np.frombuffer(
                raw, "<u2", -1, 4 * count
            )
            assert xxhash.xxh3_128_digest(weights) == data[:HASH_NBYTES], f"step {step} of {self.folder} is damaged"
            yield step, weights

    def state(self, step: int) -> Array:
        return next(weights for at, weights in self.states() if at == step)

    def tensors(self, weights: Array) -> dict[str, Array]:
        """Return views of flat weights, by name, as bfloat16 in their shapes."""
        ends = np.cumsum([prod(shape) for shape in self.shapes.values()])
        parts = np.split(weights.view(BF16), ends[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
