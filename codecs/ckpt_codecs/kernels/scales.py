# mypy: ignore-errors
"""Exponents as distances from what rows, columns and another state foretell; docs/codecs.md has the arithmetic.

Integers all the way, so that every machine foretells the same. The compiler
makes vectors of the inner loops only while every step is kept to 32 bits.
"""

from numba import types

from ckpt_codecs.kernels.jit import BYTES, NUMBERS16, NUMBERS32, OUT, OUT32, SIZE, WORDS32, kernel, part

I32, U8, U32 = types.int32, types.uint8, types.uint32
SLOWEST = 15
ENOUGH = 512
"""Values that tell the scale of a row well enough; of long rows, a quarter is asked."""


@part
def _gain(row):
    return I32(256 // (min(row, SLOWEST) + 1))


@part
def _size16(word):
    """Sixteenths of the logarithm of a float32: its exponent and four bits of its mantissa."""
    return I32((word >> U32(19)) & U32(0xFFF))


@part
def _expected(base, i, based):
    """Sixteenths of the logarithm of the root of a float32."""
    return I32(I32((base[i] >> U32(20)) & U32(0x7FF)) + I32(1016)) if based else I32(0)


@part
def _guess(foretold, column):
    return U8(I32(I32(I32(foretold << I32(4)) + column) + I32(128)) >> I32(8))


@part
def _follow(column, size16, foretold, gain, there):
    """The column, moved towards what was found in it; zeros do not count."""
    error = I32(I32(I32(size16 - foretold) << I32(4)) - column)
    step = I32(I32(error * gain) >> I32(8))
    return I32(column + (step if there else I32(0)))


@part
def _to_residuals(words, base, based, columns, column, rows, low, middle, high, top, out):
    column[:] = 0
    scale = I32(0)
    asked = min(columns, max(ENOUGH, columns // 4))
    for row in range(rows.size):
        at = row * columns
        total, n = types.int64(0), types.int64(0)
        for j in range(asked):
            size16 = _size16(words[at + j])
            there = size16 >= I32(16)
            error = I32(I32(I32(size16 - _expected(base, at + j, based)) << I32(4)) - column[j])
            total += error if there else I32(0)
            n += there
        scale = I32((total // n + 8) >> 4) if n else scale
        rows[row] = scale
        gain = _gain(row)
        for j in range(columns):
            word = words[at + j]
            size16 = _size16(word)
            exponent = U8(word >> U32(23))
            low[at + j] = U8(word)
            middle[at + j] = U8(word >> U32(8))
            high[at + j] = U8(((word >> U32(16)) & U32(0x7F)) | ((word >> U32(24)) & U32(0x80)))
            top[at + j] = exponent
            foretold = I32(_expected(base, at + j, based) + scale)
            guess = _guess(foretold, column[j])
            symbol = U8(U8(exponent - guess) + U8(64))
            symbol = U8(U8(64) - guess) if symbol == U8(0) else symbol
            out[at + j] = U8(0) if exponent == U8(0) else symbol
            column[j] = _follow(column[j], size16, foretold, gain, exponent != U8(0))


@part
def _from_residuals(residuals, low, middle, high, base, based, columns, column, rows, words):
    column[:] = 0
    for row in range(rows.size):
        at = row * columns
        scale = I32(rows[row])
        gain = _gain(row)
        for j in range(columns):
            symbol = residuals[at + j]
            foretold = I32(_expected(base, at + j, based) + scale)
            guess = _guess(foretold, column[j])
            of_zero = U8(U8(64) - guess)
            exponent = U8(U8(symbol + guess) - U8(64))
            exponent = U8(guess - U8(64)) if symbol == of_zero else exponent
            exponent = U8(0) if symbol == U8(0) else exponent
            rest = U32(high[at + j])
            word = (
                (U32(exponent) << U32(23))
                | ((rest & U32(0x7F)) << U32(16))
                | ((rest & U32(0x80)) << U32(24))
                | (U32(middle[at + j]) << U32(8))
                | U32(low[at + j])
            )
            words[at + j] = word
            column[j] = _follow(column[j], _size16(word), foretold, gain, exponent != U8(0))


@kernel(types.void, WORDS32, WORDS32, SIZE, NUMBERS32, NUMBERS16, OUT, OUT, OUT, OUT, OUT)
def to_residuals_based(words, base, columns, column, rows, low, middle, high, top, out):
    _to_residuals(words, base, True, columns, column, rows, low, middle, high, top, out)


@kernel(types.void, WORDS32, SIZE, NUMBERS32, NUMBERS16, OUT, OUT, OUT, OUT, OUT)
def to_residuals_alone(words, columns, column, rows, low, middle, high, top, out):
    _to_residuals(words, words, False, columns, column, rows, low, middle, high, top, out)


@kernel(types.void, BYTES, BYTES, BYTES, BYTES, WORDS32, SIZE, NUMBERS32, NUMBERS16, OUT32)
def from_residuals_based(residuals, low, middle, high, base, columns, column, rows, words):
    _from_residuals(residuals, low, middle, high, base, True, columns, column, rows, words)


@kernel(types.void, BYTES, BYTES, BYTES, BYTES, SIZE, NUMBERS32, NUMBERS16, OUT32)
def from_residuals_alone(residuals, low, middle, high, columns, column, rows, words):
    _from_residuals(residuals, low, middle, high, words, False, columns, column, rows, words)
