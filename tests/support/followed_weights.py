"""Weights of which each step changes a few, published by several ranks, for those that follow them."""

from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from ckpt_formats.universal.published.records import StepName, StepRecord
from published import PublishedRun, Weights

if TYPE_CHECKING:
    import torch

FILES = {"config.json": b"{}"}


def weights_at(step: int, branch: int = 0) -> Weights:
    """Weights of which each step changes a few: two chunks of bfloat16, a float32, a scalar, an empty tensor."""
    random = np.random.default_rng(branch)
    large = np.random.default_rng(9).normal(0, 0.02, (640, 512)).astype(ml_dtypes.bfloat16)
    for _ in range(step):
        large.reshape(-1).view(np.uint16)[random.integers(0, large.size, 300)] += 1
    return {
        "embed.weight": large,
        "norm.weight": np.arange(33, dtype=np.float32) + np.float32(step),
        "head.weight": np.full((6, 5), 2, np.float16),
        "scale": np.array(step, np.float64),
        "empty": np.zeros((0, 4), np.float16),
    }


def publish(run: PublishedRun, steps: range, branch: int = 0) -> None:
    for step in steps:
        run.publish(step, weights_at(step, branch))


def bytes_of(weights: Weights) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in weights.items()}


def objects_of(run: PublishedRun, first: int | None, last: int) -> list[Path]:
    """The objects of a step, or of the fold from the step `first` to it."""
    name = StepName(run.epoch, last)
    key = name.key if first is None else name.fold_key(first)
    record = StepRecord.from_bytes((run.run / key).read_bytes(), run.run / key)
    return [run.run / one.object.key for one in record.shares]


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def bytes_of_torch(tensor: "torch.Tensor") -> bytes:
    """The bytes of a tensor of torch in C order."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
