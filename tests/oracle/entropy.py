"""The twin of `entropy.c`: the entropy of a plane, by the same operations in the same order."""

import math

import numpy as np

from ckpt_codecs.base import Array

SAMPLES = 16
SAMPLE_SIZE = 256
MISSING_BITS = 0.5 / float.fromhex("0x1.62e42fefa39efp-1")
TWO_BY_LN2 = float.fromhex("0x1.71547652b82fep+1")
ROOT_OF_TWO = float.fromhex("0x1.6a09e667f3bcdp+0")


def log2(x: float) -> float:
    m, k = math.frexp(x)
    m, k = 2 * m, k - 1
    if m > ROOT_OF_TWO:
        m, k = 0.5 * m, k + 1
    s = (m - 1) / (m + 1)
    total = 1.0 / 21
    for odd in range(19, 0, -2):
        total = total * (s * s) + 1.0 / odd
    return k + TWO_BY_LN2 * (s * total)


def entropy_of(counts: Array) -> float:
    """Bits of all symbols together."""
    bits = size = 0.0
    for count in counts.tolist():
        bits -= count * log2(max(count, 1))
        size += count
    return bits + size * log2(max(size, 1))


def estimate_bits(plane: Array) -> float:
    each = plane.size // SAMPLES
    length = min(each, SAMPLE_SIZE) // 2 * 2
    sample = plane[: SAMPLES * each].reshape(SAMPLES, each)[:, :length].reshape(-1)
    counts, size = np.bincount(sample, minlength=256), max(sample.size, 1)
    bits = size * log2(size)
    for count in counts.tolist():
        bits -= count * log2(max(count, 1))
    return float((bits + (np.count_nonzero(counts) - 1) * MISSING_BITS) / size)
