# mypy: ignore-errors
"""The compiled products of matrices; `portable_matrices` does the same without Numba, bit for bit.

Sums are taken in the order in which they are written here, each product rounded on its own: Numba neither reorders nor
fuses them.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import kernel
from ckpt_codecs.lossy.model import NOTHING as _NOTHING

MATRIX = types.Array(types.float32, 2, "C", readonly=True)
OUT_MATRIX = types.Array(types.float32, 2, "C")
OUT_DOUBLES = types.Array(types.float64, 2, "C")


@kernel(types.void, MATRIX, MATRIX, OUT_MATRIX)
def times(a, x, out):
    """`out = a @ x`, each sum over the columns of `a` from the first on."""
    n, m = a.shape
    width = x.shape[1]
    whole = m // 4 * 4
    for i in range(n):
        for k in range(width):
            out[i, k] = np.float32(0)
        for j in range(0, whole, 4):
            a0, a1, a2, a3 = a[i, j], a[i, j + 1], a[i, j + 2], a[i, j + 3]
            for k in range(width):
                out[i, k] = (((out[i, k] + a0 * x[j, k]) + a1 * x[j + 1, k]) + a2 * x[j + 2, k]) + a3 * x[j + 3, k]
        for j in range(whole, m):
            a0 = a[i, j]
            for k in range(width):
                out[i, k] += a0 * x[j, k]


@kernel(types.void, MATRIX, MATRIX, OUT_MATRIX)
def turned_times(a, x, out):
    """`out = a.T @ x`, each sum over the rows of `a` from the first on."""
    n, m = a.shape
    width = x.shape[1]
    whole = n // 4 * 4
    out[:] = np.float32(0)
    for i in range(0, whole, 4):
        for j in range(m):
            a0, a1, a2, a3 = a[i, j], a[i + 1, j], a[i + 2, j], a[i + 3, j]
            for k in range(width):
                out[j, k] = (((out[j, k] + a0 * x[i, k]) + a1 * x[i + 1, k]) + a2 * x[i + 2, k]) + a3 * x[i + 3, k]
    for i in range(whole, n):
        for j in range(m):
            a0 = a[i, j]
            for k in range(width):
                out[j, k] += a0 * x[i, k]


@kernel(types.void, OUT_MATRIX, MATRIX, MATRIX)
def subtract(y, p, b):
    """`y -= p @ b`, product after product from the first on."""
    n, m = y.shape
    width = p.shape[1]
    whole = width // 4 * 4
    for i in range(n):
        for k in range(0, whole, 4):
            p0, p1, p2, p3 = p[i, k], p[i, k + 1], p[i, k + 2], p[i, k + 3]
            for j in range(m):
                y[i, j] = (((y[i, j] - p0 * b[k, j]) - p1 * b[k + 1, j]) - p2 * b[k + 2, j]) - p3 * b[k + 3, j]
        for k in range(whole, width):
            p0 = p[i, k]
            for j in range(m):
                y[i, j] -= p0 * b[k, j]


@kernel(types.void, OUT_DOUBLES, OUT_DOUBLES, OUT_DOUBLES)
def reflect(y, w, t):
    """Householder's QR decomposition of `y`, which it spends: `1 - w t w.T`, each reflection 1 - w w.T."""
    n, k = y.shape
    dots = np.empty(k)
    w[:] = 0
    t[:] = 0
    for c in range(k):
        square = 0.0
        for i in range(c, n):
            square += y[i, c] * y[i, c]
        if not square > _NOTHING:
            continue
        norm = np.sqrt(square)
        for i in range(c, n):
            w[i, c] = y[i, c]
        w[c, c] += norm if w[c, c] >= 0 else -norm
        square = 0.0
        for i in range(c, n):
            square += w[i, c] * w[i, c]
        scale = np.sqrt(2.0 / square)
        dots[c:] = 0
        for i in range(c, n):
            w[i, c] *= scale
            for j in range(c, k):
                dots[j] += w[i, c] * y[i, j]
        for i in range(c, n):
            for j in range(c, k):
                y[i, j] -= w[i, c] * dots[j]
        dots[:c] = 0
        for i in range(c, n):
            for j in range(c):
                dots[j] += w[i, c] * w[i, j]
        for i in range(c):
            with_earlier = 0.0
            for j in range(c):
                with_earlier += t[i, j] * dots[j]
            t[i, c] = -with_earlier
        t[c, c] = 1.0
