"""Passes over weights: the same bits as weights.c."""

import numpy as np

from ckpt_formats.core.tensor import Array
from oracle.matrices import sum_in_order

CENTRED = 3
"""Magnitudes up to this are decoded as the mean of what they stand for."""
MOST_MULTIPLE = 2.0**30


def scale_change(after: Array, before: Array | None, rows: Array, columns: Array, out: Array) -> float:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        out[:] = ((after if before is None else after - before) * rows[:, None]) * columns
        return float(sum_in_order(sum_in_order(np.square(out, dtype=np.float64))))


def unscale_change(values: Array, rows: Array, columns: Array, before: Array | None, out: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        change = (values * rows[:, None]) * columns
        out[:] = change if before is None else before + change


def quantize(values: Array, step: float, offset: float, codes: Array, sizes: Array, counts: Array) -> bool:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = np.abs(values / np.float32(step))
    if not scaled.max(initial=0) < MOST_MULTIPLE:
        return False
    magnitude = (scaled + np.float32(offset)).astype(np.int32)
    codes[:] = np.where(values < 0, -magnitude, magnitude)
    centred = np.where(magnitude > CENTRED, 0, magnitude).reshape(-1)
    some = np.flatnonzero(centred)
    sizes[:] = np.bincount(centred[some], scaled.reshape(-1)[some], CENTRED + 1)
    counts[:] = np.bincount(centred[some], minlength=CENTRED + 1)
    counts[0] = magnitude.sum(dtype=np.int64)
    return True


def dequantize(codes: Array, near: Array, step: float, out: Array) -> None:
    magnitude = np.abs(codes)
    with np.errstate(over="ignore"):
        value = np.where(magnitude > CENTRED, magnitude, 0).astype(np.float32) * np.float32(step)
    value = np.where(magnitude > CENTRED, value, near[np.minimum(magnitude, CENTRED)])
    out[:] = np.where(codes < 0, -value, value)
