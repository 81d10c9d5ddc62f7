"""The products of matrices without Numba: the same sums in the same order as `kernels_matrices`."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.lossy.model import NOTHING


def times(a: Array, x: Array, out: Array) -> None:
    out[:] = 0
    for j in range(a.shape[1]):
        out += a[:, j, None] * x[j]


def turned_times(a: Array, x: Array, out: Array) -> None:
    out[:] = 0
    for i in range(a.shape[0]):
        out += a[i, :, None] * x[i]


def subtract(y: Array, p: Array, b: Array) -> None:
    for k in range(p.shape[1]):
        y -= p[:, k, None] * b[k]


def reflect(y: Array, w: Array, t: Array) -> None:
    w[:] = 0
    t[:] = 0
    for c in range(y.shape[1]):
        square = float(in_order(y[c:, c] * y[c:, c]))
        if not square > NOTHING:
            continue
        norm, v = np.sqrt(square), y[c:, c].copy()
        v[0] += norm if v[0] >= 0 else -norm
        v *= np.sqrt(2.0 / float(in_order(v * v)))
        w[c:, c] = v
        y[c:, c:] -= v[:, None] * in_order(v[:, None] * y[c:, c:])
        if c:
            t[:c, c] = -in_order((t[:c, :c] * in_order(v[:, None] * w[c:, :c])).T)
        t[c, c] = 1


def in_order(terms: Array) -> Array:
    """The sum over the first axis, from the first term on. NumPy's `sum` takes whatever order it likes."""
    made: Array = np.add.accumulate(terms, axis=0)[-1]
    return made
