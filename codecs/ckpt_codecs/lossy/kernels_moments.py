# mypy: ignore-errors
"""The compiled passes over moments; `portable_moments` does the same without Numba, bit for bit.

One pass over memory each. Quotients are `np.divide`'s, which Numba does not check for zeros.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import REALS, SIZE, SIZES, WORDS32, kernel, part
from ckpt_codecs.lossy import model
from ckpt_codecs.lossy.kernels_matrices import MATRIX, OUT_MATRIX

_CAP, _TINY = np.float32(model.CAP), np.float32(model.TINY)
_ONE, _FINE = model.LEVEL_OF_ONE, model.FINE
_NEAREST = 1.5 * 2.0**52
"""Added and taken away, it rounds to nearest, ties to even."""
_NORMAL = 1 << 23
"""Bits of the least float32 that is no denormal. Of a denormal, all bits are a whole number."""
_DENORMAL, _UP = np.float32(2.0**-125), 24 * 8
_LOW, _HIGH = model.LOW, model.HIGH

VECTOR = types.Array(types.float32, 1, "C", readonly=True)
LEVELS = types.Array(types.int32, 1, "C", readonly=True)
CODES = types.Array(types.int32, 2, "C", readonly=True)
OUT_CODES = types.Array(types.int32, 2, "C")
IN_WORDS = types.Array(types.uint32, 2, "C", readonly=True)


@kernel(types.boolean, WORDS32)
def is_finite(words):
    """Are these bits of float32 numbers?"""
    most = types.uint32(0)
    for i in range(words.size):
        most = max(most, types.uint32(words[i] & types.uint32(0x7FFFFFFF)))
    return most < types.uint32(0x7F800000)


@kernel(types.UniTuple(SIZE, 2), IN_WORDS, MATRIX, REALS, REALS)
def sums(words, values, rows, columns):
    """Fill in the sums of rows and columns, in float64. The least and the largest bits of the values."""
    n, m = values.shape
    columns[:] = 0
    most, least = types.uint32(0), types.uint32(0xFFFFFFFF)
    for i in range(n):
        for j in range(m):
            columns[j] += types.float64(values[i, j])
        for j in range(m):
            most, least = max(most, words[i, j]), min(least, words[i, j])
    whole = n // 4 * 4
    for i in range(0, whole, 4):
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        for j in range(m):
            a += types.float64(values[i, j])
            b += types.float64(values[i + 1, j])
            c += types.float64(values[i + 2, j])
            d += types.float64(values[i + 3, j])
        rows[i], rows[i + 1], rows[i + 2], rows[i + 3] = a, b, c, d
    for i in range(whole, n):
        a = 0.0
        for j in range(m):
            a += types.float64(values[i, j])
        rows[i] = a
    return types.int64(least), types.int64(most)


@kernel(types.void, IN_WORDS, SIZES, SIZES)
def level_sums(words, rows, columns):
    """Fill in the sums of the values' levels, of rows and columns. Signs do not count."""
    n, m = words.shape
    columns[:] = 0
    for i in range(n):
        row = 0
        for j in range(m):
            level = types.int32(words[i, j] >> types.uint32(20) & types.uint32(0x7FF)) - types.int32(_ONE)
            columns[j] += level
            row += level
        rows[i] = row


@part
def _residual(word, level, table, each):
    """The nearest multiple, of the bits of a normal number, from a level."""
    at, low = types.int32(word >> 11) & types.int32(4095), word & types.int32(2047)
    first, then = table[types.uint32(at)], table[types.uint32(at + types.int32(1))]
    fine = types.int32(first + types.int32(types.int32((then - first) * low) >> 11))
    off = types.float64(types.int32(types.int32(word >> 23) * 8 - _ONE - level)) + types.float64(fine) * _FINE
    return types.int32((off * each + _NEAREST) - _NEAREST)


@kernel(SIZE, IN_WORDS, LEVELS, LEVELS, LEVELS, types.float64, OUT_CODES)
def residuals(words, rows, columns, table, each, codes):
    """The nearest multiples of a step, which is `1 / each` levels, between values and their rows' and columns' levels.

    Zeros have none. The sum of their magnitudes. `table`: fine parts of a level for each part of a mantissa.
    """
    n, m = words.shape
    total = 0
    for i in range(n):
        row, small = rows[i], types.int32(0)
        for j in range(m):
            word = types.int32(words[i, j])
            codes[i, j] = _residual(word, types.int32(row + columns[j]), table, each)
            small |= types.int32(word < _NORMAL)
        if small:
            for j in range(m):
                word = types.int32(words[i, j])
                if not word:
                    codes[i, j] = 0
                elif word < _NORMAL:
                    shifted = np.float32(np.float32(word) * _DENORMAL).view(np.int32)
                    codes[i, j] = _residual(shifted, types.int32(row + columns[j] + _UP), table, each)
        for j in range(m):
            total += abs(types.int64(codes[i, j]))
    return total


@kernel(types.void, LEVELS, LEVELS, types.int32, CODES, CODES, types.boolean, types.boolean, VECTOR, OUT_MATRIX)
def from_levels(rows, columns, step, codes, zeros, coded, holed, table, out):
    """The values of rows' and columns' levels: if `coded` with residuals, if `holed` 0 where `zeros` is not."""
    n, m = out.shape
    for i in range(n):
        row = rows[i]
        for j in range(m):
            level = types.int32(row + columns[j])
            if coded:
                level = types.int32(level + step * min(max(codes[i, j], types.int32(-4096)), types.int32(4096)))
            level = min(max(level, types.int32(_LOW)), types.int32(_HIGH))
            out[i, j] = table[types.uint32(level - types.int32(_LOW))]
        if holed:
            for j in range(m):
                if zeros[i, j]:
                    out[i, j] = np.float32(0)


@kernel(types.boolean, MATRIX, MATRIX, VECTOR, VECTOR, OUT_MATRIX)
def direction(first, second, rows, columns, out):
    """The first moment over the root of the second, within bounds, times row and column. True if any is not 0."""
    n, m = out.shape
    any_ = types.uint32(0)
    for i in range(n):
        row = rows[i]
        for j in range(m):
            known = second[i, j] > _TINY
            moved = np.divide(first[i, j], np.sqrt(second[i, j] if known else np.float32(1)))
            moved = _CAP if moved > _CAP else moved
            moved = -_CAP if moved < -_CAP else moved
            scaled = ((moved if known else np.float32(0)) * row) * columns[j]
            out[i, j] = scaled
            any_ |= types.uint32(scaled != 0)
    return any_ != 0


@kernel(types.void, types.float32, MATRIX, MATRIX, MATRIX, types.boolean, OUT_MATRIX)
def momentum(factor, new, old, second, rooted, out):
    """`factor` times the change of the weights, times the root of the second moments if `rooted`."""
    n, m = out.shape
    for i in range(n):
        for j in range(m):
            told = new[i, j] - old[i, j]
            if rooted:
                told *= np.sqrt(abs(second[i, j]))
            out[i, j] = factor * told


@kernel(types.UniTuple(types.float64, 2), MATRIX, MATRIX, MATRIX, types.boolean, MATRIX)
def told(new, old, second, rooted, true):
    """Of what `momentum` would make of the factor 1: its square, and its product with `true`; sums of column's sums."""
    n, m = true.shape
    square, along = np.zeros(m), np.zeros(m)
    for i in range(n):
        for j in range(m):
            made = new[i, j] - old[i, j]
            if rooted:
                made *= np.sqrt(abs(second[i, j]))
            wide = types.float64(made)
            square[j] += wide * wide
            along[j] += wide * types.float64(true[i, j])
    a, b = 0.0, 0.0
    for j in range(m):
        a += square[j]
        b += along[j]
    return a, b
