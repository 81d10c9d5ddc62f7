"""Logarithms as whole numbers: levels of 1/8 octave, and the powers of 2 that belong to them.

Only integer arithmetic builds the tables: the `exp` of a library may differ between platforms.
"""

from functools import cache
from math import isqrt

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.lossy.logarithm import log2

LOW, HIGH = -149 * 8, 128 * 8 - 1
"""The lowest and the highest level: from the smallest denormal to the largest finite float32."""
FINE = 2.0**-20
"""The unit in which the encoder measures parts of a level."""


@cache
def powers() -> Array:
    """2^(i/64) for each i from `-2 * HIGH` to `2 * HIGH`: (4 * HIGH + 1,) float32."""
    i = np.arange(-2 * HIGH, 2 * HIGH + 1)
    mantissa = np.array([_root(64 * 23 + k, 6) for k in range(64)])[i & 63]
    table: Array = (((i >> 6) + 127) << 23 | mantissa & 0x7FFFFF).astype(np.uint32).view(np.float32)
    return table


def power(level: Array) -> Array:
    """2^(level/64), the eighth root of the value of each level: float32. `level`: integers of any shape."""
    values: Array = powers()[np.clip(level, -2 * HIGH, 2 * HIGH) + 2 * HIGH]
    return values


@cache
def fine_levels() -> Array:
    """The levels of 1 + i/4096 for i from 0 to 4096, in units of `FINE`: (4097,) int32."""
    levels: Array = np.rint(log2(1 + np.arange(4097) / 4096) * 8 / FINE).astype(np.int32)
    return levels


def _root(exponent: int, halvings: int) -> int:
    """2^(exponent / 2^halvings), rounded down. Integers alone give the same result on every machine."""
    number = 1 << exponent
    for _ in range(halvings):
        number = isqrt(number)
    return number
