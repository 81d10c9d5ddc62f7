"""The twin of `bfloat16.c`: float32 rounded to bfloat16, both as the bits."""

import numpy as np

from ckpt_codecs.base import Array


def to_bfloat16(words: Array, out: Array) -> None:
    nearest = words + np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    nan = words >> np.uint32(16) & np.uint32(0x8000) | np.uint32(0x7FC0)
    out[:] = np.where(_is_nan(words), nan, nearest)


def is_bfloat16_of(words: Array, rounded: Array) -> bool:
    result = np.empty_like(rounded)
    to_bfloat16(words, result)
    return not _is_nan(words).any() and bool(np.array_equal(result, rounded))


def _is_nan(words: Array) -> Array:
    is_nan: Array = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return is_nan
