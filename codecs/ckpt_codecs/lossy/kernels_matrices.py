# mypy: ignore-errors
"""The compiled products of matrices; `portable_matrices` does the same without Numba, bit for bit.

Sums are taken in the order in which they are written here, each product rounded on its own: Numba neither reorders nor
fuses them. What is independent is done at once: elements of a row, and rows, in blocks that stay in registers.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import kernel, part
from ckpt_codecs.lossy.lanes import LANES, load, minus, plus, store, zero
from ckpt_codecs.lossy.model import NOTHING as _NOTHING

MATRIX = types.Array(types.float32, 2, "C", readonly=True)
OUT_MATRIX = types.Array(types.float32, 2, "C")
_PAIR = 2 * LANES
_BLOCK = 128
"""Rows of this many pairs of lanes stay in the first cache."""
OUT_DOUBLES = types.Array(types.float64, 2, "C")


@part
def _times_rest(a, x, out, first, end, left):
    """The same of some rows, and of the columns from one on."""
    m, width = x.shape
    whole = m // 4 * 4
    for i in range(first, end):
        for k in range(types.uint64(left), types.uint64(width)):
            out[i, k] = np.float32(0)
        for j in range(0, whole, 4):
            a0, a1, a2, a3 = a[i, j], a[i, j + 1], a[i, j + 2], a[i, j + 3]
            for k in range(types.uint64(left), types.uint64(width)):
                out[i, k] = (((out[i, k] + a0 * x[j, k]) + a1 * x[j + 1, k]) + a2 * x[j + 2, k]) + a3 * x[j + 3, k]
        for j in range(whole, m):
            for k in range(types.uint64(left), types.uint64(width)):
                out[i, k] += a[i, j] * x[j, k]


@part
def _turned_rest(a, x, out, first, end, left):
    n, width = x.shape
    whole = n // 4 * 4
    for j in range(first, end):
        for k in range(types.uint64(left), types.uint64(width)):
            out[j, k] = np.float32(0)
    for i in range(0, whole, 4):
        for j in range(first, end):
            a0, a1, a2, a3 = a[i, j], a[i + 1, j], a[i + 2, j], a[i + 3, j]
            for k in range(types.uint64(left), types.uint64(width)):
                out[j, k] = (((out[j, k] + a0 * x[i, k]) + a1 * x[i + 1, k]) + a2 * x[i + 2, k]) + a3 * x[i + 3, k]
    for i in range(whole, n):
        for j in range(first, end):
            for k in range(types.uint64(left), types.uint64(width)):
                out[j, k] += a[i, j] * x[i, k]


@part
def _subtract_rest(y, p, b, first, end, left):
    width, m = b.shape
    whole = width // 4 * 4
    for i in range(first, end):
        for k in range(0, whole, 4):
            p0, p1, p2, p3 = p[i, k], p[i, k + 1], p[i, k + 2], p[i, k + 3]
            for j in range(types.uint64(left), types.uint64(m)):
                y[i, j] = (((y[i, j] - p0 * b[k, j]) - p1 * b[k + 1, j]) - p2 * b[k + 2, j]) - p3 * b[k + 3, j]
        for k in range(whole, width):
            for j in range(types.uint64(left), types.uint64(m)):
                y[i, j] -= p[i, k] * b[k, j]


@kernel(types.void, MATRIX, MATRIX, OUT_MATRIX)
def times(a, x, out):
    """`out = a @ x`, each sum over the columns of `a` from the first on."""
    n, m = a.shape
    width = x.shape[1]
    pairs, whole = n // 2 * 2, width // _PAIR * _PAIR
    for start in range(0, m, _BLOCK):
        end = min(start + _BLOCK, m)
        for k in range(0, whole, _PAIR):
            for i in range(0, pairs, 2):
                if start:
                    p, q = load(out, i, k), load(out, i, k + LANES)
                    r, s = load(out, i + 1, k), load(out, i + 1, k + LANES)
                else:
                    p, q, r, s = zero(), zero(), zero(), zero()
                for j in range(start, end):
                    left, right = load(x, j, k), load(x, j, k + LANES)
                    p, q = plus(p, a[i, j], left), plus(q, a[i, j], right)
                    r, s = plus(r, a[i + 1, j], left), plus(s, a[i + 1, j], right)
                store(out, i, k, p)
                store(out, i, k + LANES, q)
                store(out, i + 1, k, r)
                store(out, i + 1, k + LANES, s)
    _times_rest(a, x, out, 0, pairs, whole)
    _times_rest(a, x, out, pairs, n, 0)


@kernel(types.void, MATRIX, MATRIX, OUT_MATRIX)
def turned_times(a, x, out):
    """`out = a.T @ x`, each sum over the rows of `a` from the first on."""
    n, m = a.shape
    width = x.shape[1]
    pairs, whole = m // 2 * 2, width // _PAIR * _PAIR
    for start in range(0, n, _BLOCK):
        end = min(start + _BLOCK, n)
        for k in range(0, whole, _PAIR):
            for j in range(0, pairs, 2):
                if start:
                    p, q = load(out, j, k), load(out, j, k + LANES)
                    r, s = load(out, j + 1, k), load(out, j + 1, k + LANES)
                else:
                    p, q, r, s = zero(), zero(), zero(), zero()
                for i in range(start, end):
                    left, right = load(x, i, k), load(x, i, k + LANES)
                    p, q = plus(p, a[i, j], left), plus(q, a[i, j], right)
                    r, s = plus(r, a[i, j + 1], left), plus(s, a[i, j + 1], right)
                store(out, j, k, p)
                store(out, j, k + LANES, q)
                store(out, j + 1, k, r)
                store(out, j + 1, k + LANES, s)
    _turned_rest(a, x, out, 0, pairs, whole)
    _turned_rest(a, x, out, pairs, m, 0)


@kernel(types.void, OUT_MATRIX, MATRIX, MATRIX)
def subtract(y, p, b):
    """`y -= p @ b`, product after product from the first on."""
    n, m = y.shape
    width = p.shape[1]
    pairs, whole = n // 2 * 2, m // _PAIR * _PAIR
    close = np.empty((width, _PAIR), np.float32)
    for j in range(0, whole, _PAIR):
        for k in range(width):
            for lane in range(_PAIR):
                close[k, lane] = b[k, j + lane]
        for i in range(0, pairs, 2):
            c, d, e, f = load(y, i, j), load(y, i, j + LANES), load(y, i + 1, j), load(y, i + 1, j + LANES)
            for k in range(width):
                left, right = load(close, k, 0), load(close, k, LANES)
                c, d = minus(c, p[i, k], left), minus(d, p[i, k], right)
                e, f = minus(e, p[i + 1, k], left), minus(f, p[i + 1, k], right)
            store(y, i, j, c)
            store(y, i, j + LANES, d)
            store(y, i + 1, j, e)
            store(y, i + 1, j + LANES, f)
    _subtract_rest(y, p, b, 0, pairs, whole)
    _subtract_rest(y, p, b, pairs, n, 0)


@kernel(types.void, OUT_DOUBLES, OUT_DOUBLES, OUT_DOUBLES)
def reflect(y, w, t):
    """Householder's QR decomposition of `y`, which it spends: `1 - w t w.T`, each reflection 1 - w w.T.

    Reflections take the place of the columns of `y` that they have made: one pass over its rows then multiplies a
    new one with all, with the reflections before it and with the columns that are left.
    """
    n, k = y.shape
    dots, v = np.empty(k), np.empty(n)
    w[:] = 0
    t[:] = 0
    for c in range(k):
        square = 0.0
        for i in range(c, n):
            square += y[i, c] * y[i, c]
        if not square > _NOTHING:
            for i in range(c, n):
                y[i, c] = 0.0
            continue
        norm = np.sqrt(square)
        for i in range(c, n):
            v[i] = y[i, c]
        v[c] += norm if v[c] >= 0 else -norm
        square = 0.0
        for i in range(c, n):
            square += v[i] * v[i]
        scale = np.sqrt(np.divide(2.0, square))
        for i in range(c, n):
            v[i] *= scale
            y[i, c] = v[i]
            w[i, c] = v[i]
        dots[:] = 0
        whole = c + (n - c) // 4 * 4
        for i in range(c, whole, 4):
            v0, v1, v2, v3 = v[i], v[i + 1], v[i + 2], v[i + 3]
            for j in range(k):
                dots[j] = (((dots[j] + v0 * y[i, j]) + v1 * y[i + 1, j]) + v2 * y[i + 2, j]) + v3 * y[i + 3, j]
        for i in range(whole, n):
            for j in range(k):
                dots[j] += v[i] * y[i, j]
        for i in range(c, n):
            for j in range(c + 1, k):
                y[i, j] -= v[i] * dots[j]
        for i in range(c):
            with_earlier = 0.0
            for j in range(c):
                with_earlier += t[i, j] * dots[j]
            t[i, c] = -with_earlier
        t[c, c] = 1.0
