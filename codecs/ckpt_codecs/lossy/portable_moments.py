"""The passes over moments without Numba: the same bits as `kernels_moments`."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.lossy.model import CAP, FINE, HIGH, LEVEL_OF_ONE, LOW, TINY
from ckpt_codecs.lossy.portable_matrices import in_order


def is_finite(words: Array) -> bool:
    return bool(np.isfinite(words.view(np.float32)).all())


def sums(words: Array, values: Array, rows: Array, columns: Array) -> tuple[int, int]:
    wide = values.astype(np.float64)
    rows[:], columns[:] = in_order(wide.T), in_order(wide)
    return int(words.min()), int(words.max())


def level_sums(words: Array, rows: Array, columns: Array) -> None:
    level = (words >> np.uint32(20) & np.uint32(0x7FF)).astype(np.int64) - LEVEL_OF_ONE
    rows[:], columns[:] = level.sum(1), level.sum(0)


def residuals(words: Array, rows: Array, columns: Array, table: Array, each: float, codes: Array) -> int:
    values = words.view(np.float32)
    small = values < np.float32(2.0**-126)
    word = np.where(small, np.where(small, values, 0) * np.float32(2.0**24), values).view(np.int32)
    at, low = word >> 11 & 4095, word & 2047
    fine = table[at] + ((table[at + 1] - table[at]) * low >> 11)
    level = (word >> 23) * 8 - LEVEL_OF_ONE - 24 * 8 * small
    off = (level - rows[:, None] - columns) + fine * FINE
    codes[:] = np.where(words > 0, np.rint(off * each), 0)
    return int(np.abs(codes).sum(dtype=np.int64))


def from_levels(
    rows: Array,
    columns: Array,
    step: int,
    codes: Array,
    zeros: Array,
    coded: bool,
    holed: bool,
    table: Array,
    out: Array,
) -> None:
    level = rows[:, None] + columns
    if coded:
        level = level + np.int32(step) * np.clip(codes, -4096, 4096)
    out[:] = table[np.clip(level, LOW, HIGH) - LOW]
    if holed:
        out[zeros != 0] = 0


def direction(first: Array, second: Array, rows: Array, columns: Array, out: Array) -> bool:
    known = second > np.float32(TINY)
    with np.errstate(over="ignore", under="ignore"):
        moved = first / np.sqrt(np.where(known, second, np.float32(1)))
        moved = np.where(known, np.clip(moved, np.float32(-CAP), np.float32(CAP)), np.float32(0))
        out[:] = (moved * rows[:, None]) * columns
    return bool(out.any())


def momentum(factor: float, new: Array, old: Array, second: Array, rooted: bool, out: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        out[:] = np.float32(factor) * _told(new, old, second, rooted)


def told(new: Array, old: Array, second: Array, rooted: bool, true: Array) -> tuple[float, float]:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        wide = _told(new, old, second, rooted).astype(np.float64)
        square, along = (float(in_order(in_order(x))) for x in (wide * wide, wide * true))
    return square, along


def _told(new: Array, old: Array, second: Array, rooted: bool) -> Array:
    change: Array = new - old
    return change * np.sqrt(np.abs(second)) if rooted else change
