"""The twin of `residuals.c`: exponents as differences from what rows, columns and another state predict."""

import numpy as np

from ckpt_codecs.base import Array

SLOWEST_ROW = 15
MIN_SCALE_VALUES = 512


def as_float32(words: Array) -> Array:
    """The bits of float32 of these bits of float32 or bfloat16."""
    return words if words.itemsize == 4 else words.astype(np.uint32) << np.uint32(16)


def to_residuals(words: Array, base: Array | None, columns: int) -> tuple[Array, Array]:
    """The residuals, uint8, and the scale of each row, int16."""
    words = as_float32(words)
    exponents = (words >> np.uint32(23)).astype(np.uint8)
    sizes, expected = _sizes(words), _expected(base, words.size)
    residuals, scales = np.empty(words.size, np.uint8), np.empty(words.size // columns, np.int16)
    column, scale = np.zeros(columns, np.int32), 0
    number = min(columns, max(MIN_SCALE_VALUES, columns // 4))
    for row in range(scales.size):
        here = slice(row * columns, (row + 1) * columns)
        nonzero = sizes[here][:number] >= 16
        error = (sizes[here] - expected[here] << 4) - column
        if nonzero.any():
            scale = (int(error[:number][nonzero].sum(dtype=np.int64)) // int(nonzero.sum()) + 8) >> 4
        scales[row] = scale
        predicted = expected[here] + np.int32(scale)
        guess = _guess(predicted, column)
        residual = exponents[here] - guess + np.uint8(64)
        residual = np.where(residual == 0, np.uint8(64) - guess, residual)
        residuals[here] = np.where(exponents[here] == 0, np.uint8(0), residual)
        _follow(column, sizes[here], predicted, row, exponents[here] != 0)
    return residuals, scales


def from_residuals(residuals: Array, rest: Array, scales: Array, base: Array | None, columns: int) -> Array:
    """The exponents, uint8. `rest`: the plane that has the upper bits of mantissas."""
    expected = _expected(base, residuals.size)
    column = np.zeros(columns, np.int32)
    sixteenths = (rest >> np.uint8(3) & np.uint8(15)).astype(np.int32)
    exponents = np.empty(residuals.size, np.uint8)
    for row in range(scales.size):
        here = slice(row * columns, (row + 1) * columns)
        predicted = expected[here] + np.int32(scales[row])
        guess = _guess(predicted, column)
        residual = residuals[here]
        exponent = residual + guess - np.uint8(64)
        exponent = np.where(residual == np.uint8(64) - guess, guess - np.uint8(64), exponent)
        exponents[here] = exponent = np.where(residual == 0, np.uint8(0), exponent)
        _follow(column, (exponent.astype(np.int32) << 4) + sixteenths[here], predicted, row, exponent != 0)
    return exponents


def _sizes(words: Array) -> Array:
    return (words >> np.uint32(19) & np.uint32(0xFFF)).astype(np.int32)


def _expected(base: Array | None, size: int) -> Array:
    if base is None:
        return np.zeros(size, np.int32)
    return (as_float32(base) >> np.uint32(20) & np.uint32(0x7FF)).astype(np.int32) + np.int32(1016)


def _guess(predicted: Array, column: Array) -> Array:
    return ((predicted << 4) + column + 128 >> 8).astype(np.uint8)


def _follow(column: Array, sizes: Array, predicted: Array, row: int, nonzero: Array) -> None:
    gain = np.int32(256 // (min(row, SLOWEST_ROW) + 1))
    error = (sizes - predicted << 4) - column
    column += np.where(nonzero, error * gain >> 8, 0).astype(np.int32)
