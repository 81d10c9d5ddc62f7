# mypy: ignore-errors
"""The compiled passes over weights; `portable_weights` does the same without Numba, bit for bit."""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import REALS, SIZE, SIZES, kernel
from ckpt_codecs.lossy import model
from ckpt_codecs.lossy.kernels_matrices import MATRIX, OUT_MATRIX
from ckpt_codecs.lossy.kernels_moments import CODES, OUT_CODES, VECTOR

_LARGEST = np.float32(model.LARGEST)
_CENTRED = model.CENTRED


@kernel(types.float64, MATRIX, MATRIX, types.boolean, VECTOR, VECTOR, OUT_MATRIX)
def forward(true, before, based, rows, columns, out):
    """The change if `based`, else the values, times row and column. Their squares: the sum of the columns' sums."""
    n, m = out.shape
    squares = np.zeros(m)
    for i in range(n):
        row = rows[i]
        for j in range(m):
            change = true[i, j] - before[i, j] if based else true[i, j]
            scaled = (change * row) * columns[j]
            out[i, j] = scaled
            squares[j] += types.float64(scaled) * types.float64(scaled)
    total = 0.0
    for j in range(m):
        total += squares[j]
    return total


@kernel(SIZE, MATRIX, types.float32, types.float32, OUT_CODES, REALS, SIZES)
def quantise(values, step, shift, codes, sizes, counts):
    """Multiples of a step: the sum of their magnitudes, -1 if there is none for a value. `shift` is 1 less `zero`.

    Adds to `sizes` and `counts` those of the magnitudes that are given back as the mean of what they stand for.
    """
    n, m = values.shape
    total = 0
    for i in range(n):
        off, row = types.int32(0), 0
        for j in range(m):
            scaled = abs(np.divide(values[i, j], step))
            off |= types.int32(not scaled < _LARGEST)
            magnitude = types.int32((scaled if scaled < _LARGEST else np.float32(0)) + shift)
            codes[i, j] = -magnitude if values[i, j] < 0 else magnitude
            row += types.int64(magnitude)
        if off:
            return -1
        total += row
        if row:
            for j in range(m):
                if codes[i, j]:
                    magnitude = abs(types.int64(codes[i, j]))
                    if magnitude <= _CENTRED:
                        sizes[magnitude] += types.float64(abs(np.divide(values[i, j], step)))
                        counts[magnitude] += 1
    return total


@kernel(types.void, CODES, VECTOR, types.float32, OUT_MATRIX)
def from_codes(codes, near, step, out):
    """What multiples stand for: magnitudes of up to 3 for `near`, others for so many steps."""
    n, m = out.shape
    one, two, three = near[1], near[2], near[3]
    for i in range(n):
        for j in range(m):
            code = codes[i, j]
            magnitude = types.int32(abs(code))
            value = np.float32(magnitude) * step
            value = three if magnitude == 3 else value
            value = two if magnitude == 2 else value
            value = one if magnitude == 1 else value
            out[i, j] = -value if code < 0 else value


@kernel(types.void, MATRIX, VECTOR, VECTOR, MATRIX, types.boolean, OUT_MATRIX)
def back(values, rows, columns, before, based, out):
    """Values times row and column, with what was before added if `based`."""
    n, m = out.shape
    for i in range(n):
        row = rows[i]
        for j in range(m):
            scaled = (values[i, j] * row) * columns[j]
            out[i, j] = before[i, j] + scaled if based else scaled
