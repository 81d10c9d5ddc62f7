"""Passes over moments: the same bits as moments.c."""

from functools import cache
from math import isqrt

import numpy as np

from ckpt_formats.core.tensor import Array
from oracle.matrices import sum_in_order

LOWEST, HIGHEST = -149 * 8, 128 * 8 - 1
"""Levels, eighths of an octave: of the least denormal and of the largest finite float32."""
LEVEL_OF_ONE = 127 * 8
MOST_RESIDUAL = 4096
MOST_DIRECTION, LEAST_SECOND_MOMENT = np.float32(16), np.float32(1e-30)


def is_finite(values: Array) -> bool:
    return bool(np.isfinite(values).all())


def sum_rows_and_columns(values: Array, rows: Array, columns: Array) -> tuple[int, int]:
    wide, words = values.astype(np.float64), values.view(np.uint32)
    rows[:], columns[:] = sum_in_order(wide.T), sum_in_order(wide)
    return int(words.min(initial=0xFFFFFFFF)), int(words.max(initial=0))


def sum_levels(values: Array, rows: Array, columns: Array) -> None:
    level = (values.view(np.uint32) >> np.uint32(20) & np.uint32(0x7FF)).astype(np.int64) - LEVEL_OF_ONE
    rows[:], columns[:] = level.sum(1), level.sum(0)


def encode_residuals(
    values: Array, rows: Array, columns: Array, step: int, fine_levels: Array, residuals: Array
) -> int:
    small = values < np.float32(2.0**-126)
    word = np.where(small, np.where(small, values, 0) * np.float32(2.0**24), values).view(np.int32)
    at, low = word >> 11 & 4095, word & 2047
    fine = fine_levels[at] + ((fine_levels[at + 1] - fine_levels[at]) * low >> 11)
    level = (word >> 23) * 8 - LEVEL_OF_ONE - 24 * 8 * small
    off = (level - rows[:, None] - columns) + fine * 2.0**-20
    residuals[:] = np.where(values > 0, np.rint(off * (1 / step)), 0)
    return int(np.abs(residuals).sum(dtype=np.int64))


def decode_levels(
    rows: Array, columns: Array, step: int, residuals: Array | None, zeros: Array | None, out: Array
) -> None:
    level = rows[:, None] + columns
    if residuals is not None:
        level = level + np.int32(step) * np.clip(residuals, -MOST_RESIDUAL, MOST_RESIDUAL)
    out[:] = values_of_levels()[np.clip(level, LOWEST, HIGHEST) - LOWEST]
    if zeros is not None:
        out[zeros != 0] = 0


@cache
def values_of_levels() -> Array:
    """2^(i/8) as float32, for i from LOWEST to HIGHEST, rounded down; not to 0. Whole numbers alone decide."""
    level = np.arange(LOWEST, HIGHEST + 1)
    exponent, part = level >> 3, level & 7
    mantissa = np.array([isqrt(isqrt(isqrt(1 << (8 * 23 + i)))) for i in range(8)])[part]
    normal = (exponent + 127) << 23 | mantissa & 0x7FFFFF
    denormal = np.maximum(mantissa >> np.maximum(-126 - exponent, 0), 1)
    values: Array = np.where(exponent >= -126, normal, denormal).astype(np.uint32).view(np.float32)
    return values


def update_direction(first: Array, second: Array, rows: Array, columns: Array, out: Array) -> bool:
    known = second > LEAST_SECOND_MOMENT
    with np.errstate(over="ignore", under="ignore"):
        direction = first / np.sqrt(np.where(known, second, np.float32(1)))
        direction = np.where(known, np.clip(direction, -MOST_DIRECTION, MOST_DIRECTION), np.float32(0))
        out[:] = (direction * rows[:, None]) * columns
    return bool(out.any())


def derive_first_moment(factor: float, after: Array, before: Array, second: Array | None, out: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        out[:] = np.float32(factor) * _scaled_change(after, before, second)


def fit_first_moment(after: Array, before: Array, second: Array | None, moment: Array) -> tuple[float, float]:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        wide = _scaled_change(after, before, second).astype(np.float64)
        square, product = (float(sum_in_order(sum_in_order(x))) for x in (wide * wide, wide * moment))
    return square, product


def _scaled_change(after: Array, before: Array, second: Array | None) -> Array:
    change: Array = after - before
    return change if second is None else change * np.sqrt(np.abs(second))
