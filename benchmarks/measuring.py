"""How fast the kernels of `ckpt stats` measure values, in GB of values for each second of one core.

.venv/bin/python benchmarks/measuring.py
"""

import time

import ml_dtypes
import numpy as np

from ckpt.compare.statistics.figures import Measurement
from ckpt_formats.core.tensor import Array

SIZE, BLOCK, ROUNDS = 1 << 23, 1 << 18, 5
"""Values of each type; those of a block, as they are read; of so many rounds, the fastest counts."""


def rate(values: Array) -> float:
    """GB/s of an array: (n,) of any type."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        measurement = Measurement(values.dtype, values.size)
        for at in range(0, values.size, BLOCK):
            measurement.add(values[at : at + BLOCK])
        measurement.figures()
        best = min(best, time.process_time() - start)
    return values.nbytes / best / 1e9


def main() -> None:
    rng = np.random.default_rng(0)
    usual = rng.normal(0, 0.02, SIZE).astype(np.float32)
    kinds = {
        "float32": usual,
        "float64": usual.astype(np.float64),
        "bfloat16": usual.astype(ml_dtypes.bfloat16),
        "float16": usual.astype(np.float16),
        "float8_e4m3fn": usual.astype(ml_dtypes.float8_e4m3fn),
        "float32, a NaN in each block": np.where(np.arange(SIZE) % 4000 == 0, np.float32(np.nan), usual),
        "float32, all zero": np.zeros_like(usual),
        "float32, random bits": rng.integers(0, 1 << 32, SIZE, np.uint32).view(np.float32),
        "bfloat16, random bits": rng.integers(0, 1 << 16, SIZE, np.uint16).view(ml_dtypes.bfloat16),
    }
    for name, values in kinds.items():
        print(f"{name:>30}  {rate(values):5.2f} GB/s")


if __name__ == "__main__":
    main()
