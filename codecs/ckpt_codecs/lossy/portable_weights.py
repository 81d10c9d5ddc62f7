"""The passes over weights without Numba: the same bits as `kernels_weights`."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.lossy.model import CENTRED, LARGEST
from ckpt_codecs.lossy.portable_matrices import in_order


def forward(true: Array, before: Array, based: bool, rows: Array, columns: Array, out: Array) -> float:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        out[:] = ((true - before if based else true) * rows[:, None]) * columns
        return float(in_order(in_order(np.square(out, dtype=np.float64))))


def quantise(values: Array, step: float, shift: float, codes: Array, sizes: Array, counts: Array) -> int:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = np.abs(values / np.float32(step))
    if not scaled.max(initial=0) < LARGEST:
        return -1
    magnitude = (scaled + np.float32(shift)).astype(np.int32)
    codes[:] = np.where(values < 0, -magnitude, magnitude)
    each = np.where(magnitude > CENTRED, 0, magnitude).reshape(-1)
    some = np.flatnonzero(each)
    sizes += np.bincount(each[some], scaled.reshape(-1)[some], CENTRED + 1)
    counts += np.bincount(each[some], minlength=CENTRED + 1)
    return int(magnitude.sum(dtype=np.int64))


def from_codes(codes: Array, near: Array, step: float, out: Array) -> None:
    magnitude = np.abs(codes)
    with np.errstate(over="ignore"):
        value = np.where(magnitude > CENTRED, magnitude, 0).astype(np.float32) * np.float32(step)
    value = np.where(magnitude > CENTRED, value, near[np.minimum(magnitude, CENTRED)])
    out[:] = np.where(codes < 0, -value, value)


def back(values: Array, rows: Array, columns: Array, before: Array, based: bool, out: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = (values * rows[:, None]) * columns
        out[:] = before + scaled if based else scaled
