"""Products of matrices and Householder's reflections: the same sums in the same order as matrices.c."""

import numpy as np

from ckpt_formats.core.tensor import Array

NO_LENGTH = 1e-200
"""The square of a length up to which a column has no direction."""


def multiply(a: Array, x: Array, out: Array) -> None:
    out[:] = 0
    for j in range(a.shape[1]):
        out += a[:, j, None] * x[j]


def multiply_transposed(a: Array, x: Array, out: Array) -> None:
    out[:] = 0
    for i in range(a.shape[0]):
        out += a[i, :, None] * x[i]


def subtract_product(y: Array, a: Array, b: Array) -> None:
    for k in range(a.shape[1]):
        y -= a[:, k, None] * b[k]


def decompose_qr(y: Array, w: Array, t: Array) -> None:
    y = y.astype(np.float64)
    reflections, triangle = np.zeros(w.shape), np.zeros(t.shape)
    for c in range(y.shape[1]):
        square = float(sum_in_order(y[c:, c] * y[c:, c]))
        if not square > NO_LENGTH:
            continue
        norm, v = np.sqrt(square), y[c:, c].copy()
        v[0] += norm if v[0] >= 0 else -norm
        v *= np.sqrt(2.0 / float(sum_in_order(v * v)))
        reflections[c:, c] = v
        y[c:, c:] -= v[:, None] * sum_in_order(v[:, None] * y[c:, c:])
        if c:
            earlier = sum_in_order(v[:, None] * reflections[c:, :c])
            triangle[:c, c] = -sum_in_order((triangle[:c, :c] * earlier).T)
        triangle[c, c] = 1
    w[:], t[:] = reflections, triangle


def sum_in_order(terms: Array) -> Array:
    """The sum over the first axis, to 0 from the first term on. NumPy's `sum` takes whatever order it likes."""
    zeros = np.zeros((1, *terms.shape[1:]), terms.dtype)
    sums: Array = np.add.accumulate(np.concatenate([zeros, terms]), axis=0)[-1]
    return sums
