"""Gradients as training makes them, dense and sparse, scaled and rounded, with awkward values among them."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.native import lossless

F32, U32 = np.float32, np.uint32
CHUNK = 1 << 18
AWKWARD = np.array(
    [0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x7F7FFFFF, 0x00800000], U32
).view(F32)
"""-0.0, denormals, infinities, NaNs with payloads, the largest and the least normal number."""


def gradients(seed: int = 0, n: int = CHUNK) -> Array:
    """As a matrix of 512 columns has them: normal numbers, with a scale for each row and for each column."""
    random = np.random.default_rng(seed)
    rows = -(-n // 512)
    scales = np.exp(random.normal(0, 1, (rows, 1))) * np.exp(random.normal(0, 0.7, (1, 512))) * 1e-3
    return (random.normal(0, 1, (rows, 512)) * scales).astype(F32).reshape(-1)[:n].copy()


def rounded(values: Array) -> Array:
    """Rounded to bfloat16, as float32."""
    numbers = np.empty(values.size, np.uint16)
    lossless.to_bfloat16(values.view(U32), numbers)
    return (numbers.astype(U32) << U32(16)).view(F32)


def largest(values: Array, share: float) -> Array:
    """All but so many of the largest magnitudes set to zero."""
    limit = np.quantile(np.abs(values), 1 - share)
    return np.where(np.abs(values) >= limit, values, F32(0)).astype(F32)


HOSTILE: list[tuple[str, Array]] = [
    ("dense", gradients(0, 3000)),
    ("scaled", rounded(gradients(1, 3000)) * F32(0.7)),
    ("sparse", largest(gradients(2, 9000), 0.1)),
    ("sparse-many", largest(gradients(9, 60_000), 0.03)),
    ("sparse-scaled", largest(rounded(gradients(3, 30_000)), 0.05) * F32(0.7)),
    ("sparse-few", largest(gradients(4, 5000), 0.002)),
    ("stored", np.concatenate([gradients(5, 3000), AWKWARD, gradients(6, 700)])),
    ("many-blocks", gradients(7, 140_000)),
    ("short", gradients(8, 40)),
    ("matrix", gradients(10, 20_480).reshape(-1, 512)),
]
