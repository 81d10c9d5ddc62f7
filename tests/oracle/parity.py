"""The kernel of Reed-Solomon codes in NumPy, by tables of logarithms: a specification, not fast."""

import numpy as np

from ckpt_codecs.base import Array


def _tables() -> tuple[Array, Array]:
    """Powers of 2 in GF(2^8) of 0x11d, twice over, and the logarithm of each element but 0."""
    powers, logarithms, element = np.zeros(510, np.uint8), np.zeros(256, np.int64), 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = element
        logarithms[element] = exponent
        element = element << 1 ^ (0x11D if element & 0x80 else 0)
    return powers, logarithms


POWERS, LOGARITHMS = _tables()


def add_products(matrix: Array, inputs: Array, outputs: Array, gfni: bool | None = None) -> None:
    for row, sums in zip(matrix, outputs, strict=True):
        for constant, block in zip(row, inputs, strict=True):
            products = POWERS[LOGARITHMS[constant] + LOGARITHMS[block]]
            sums ^= np.where((block == 0) | (constant == 0), np.uint8(0), products)
