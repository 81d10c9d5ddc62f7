"""Logarithms as whole numbers: eighths of an octave, and powers of 2. No library's `exp` decides."""

from functools import cache
from math import isqrt

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.lossy.logarithm import log2

LOW, HIGH = -149 * 8, 128 * 8 - 1
"""Levels, eighths of an octave: from the least denormal to the largest finite float32."""
FINE = 2.0**-20
"""The encoder's measure of parts of a level."""


@cache
def powers() -> Array:
    """2^(i/64) as float32, for i from `-2 * HIGH` to `2 * HIGH`."""
    i = np.arange(-2 * HIGH, 2 * HIGH + 1)
    mantissa = np.array([_root(64 * 23 + k, 6) for k in range(64)])[i & 63]
    made: Array = (((i >> 6) + 127) << 23 | mantissa & 0x7FFFFF).astype(np.uint32).view(np.float32)
    return made


def power(level: Array) -> Array:
    """2^(level/64): the eighth root of the value of that level."""
    made: Array = powers()[np.clip(level, -2 * HIGH, 2 * HIGH) + 2 * HIGH]
    return made


@cache
def fine_levels() -> Array:
    """The levels of 1 + i/4096, from 1 to 2, in the encoder's fine parts."""
    made: Array = np.rint(log2(1 + np.arange(4097) / 4096) * 8 / FINE).astype(np.int32)
    return made


def _root(exponent: int, halvings: int) -> int:
    """2^(exponent / 2^halvings), cut: whole numbers alone are the same everywhere."""
    number = 1 << exponent
    for _ in range(halvings):
        number = isqrt(number)
    return number
