"""Logarithms as whole numbers: eighths of an octave, and the float32 that each means. No library's `exp` decides."""

from functools import cache
from math import isqrt

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.lossy.model import FINE, HIGH, LOW


@cache
def values() -> Array:
    """2^(i/8) as float32, for i from `LOW` to `HIGH`; denormals are cut, none is zero."""
    level = np.arange(LOW, HIGH + 1)
    exponent, part = level >> 3, level & 7
    mantissa = np.array([_root(8 * 23 + i, 3) for i in range(8)])[part]
    normal = (exponent + 127) << 23 | mantissa & 0x7FFFFF
    denormal = np.maximum(mantissa >> np.maximum(-126 - exponent, 0), 1)
    made: Array = np.where(exponent >= -126, normal, denormal).astype(np.uint32).view(np.float32)
    return made


@cache
def powers() -> Array:
    """2^(i/64) as float32, for i from `-2 * HIGH` to `2 * HIGH`."""
    i = np.arange(-2 * HIGH, 2 * HIGH + 1)
    mantissa = np.array([_root(64 * 23 + k, 6) for k in range(64)])[i & 63]
    made: Array = (((i >> 6) + 127) << 23 | mantissa & 0x7FFFFF).astype(np.uint32).view(np.float32)
    return made


def power(level: Array) -> Array:
    """2^(level/64): the eighth root of `value`."""
    made: Array = powers()[np.clip(level, -2 * HIGH, 2 * HIGH) + 2 * HIGH]
    return made


@cache
def fine() -> Array:
    """The levels of 1 + i/4096, from 1 to 2, in the encoder's fine parts."""
    made: Array = np.rint(np.log2(1 + np.arange(4097) / 4096) * 8 / FINE).astype(np.int32)
    return made


def _root(exponent: int, halvings: int) -> int:
    """2^(exponent / 2^halvings), cut: whole numbers alone are the same everywhere."""
    number = 1 << exponent
    for _ in range(halvings):
        number = isqrt(number)
    return number
