# mypy: ignore-errors
"""Floats on a grid of one's own for each value; docs/delta-codecs.md has the arithmetic.

A stream of bits has eight bytes more than it needs, so that every word of it can be loaded and stored whole.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, OUT, OUT32, SIZE, WORDS32, kernel, part
from ckpt_codecs.kernels.memory import load64, store64

I32, U8, U32, U64 = types.int32, types.uint8, types.uint32, types.uint64
MANTISSA = 23
MIDDLE = 127
FARTHEST = 126
PLUS_ZERO, MINUS_ZERO = 255, 254
FAR, SMALL = 32, 33


@part
def _place(word, unit):
    """How many units a value has, whole ones, with its sign; 0 also where a mantissa could not tell."""
    above = I32(I32((word >> U32(23)) & U32(255)) - unit)
    inside = (above >= I32(0)) & (above <= I32(MANTISSA))
    mantissa = I32((word & U32(0x7FFFFF)) | U32(0x800000))
    units = I32(mantissa >> I32(MANTISSA - above)) if inside else I32(0)
    return I32(-units) if word >> U32(31) else units


@part
def _put(bits, at, word, held, raw, many):
    """Append `many <= 32` bits to a stream that has `held < 8` bits in `word`."""
    word |= U64(raw) << U64(held)
    held += many
    store64(bits, at, word)
    whole = held >> 3
    return at + whole, word >> U64(8 * whole), held & 7


@kernel(SIZE, WORDS32, WORDS32, BYTES, OUT, OUT, OUT)
def to_grid(foretold, found, units, symbols, depths, bits):
    """Fill symbols; returns how many depths there are, times 2^40, plus how many bits.

    `bits` has room for 4 bytes a value, and 8.
    """
    many, at, held, word = 0, 0, 0, U64(0)
    for i in range(found.size):
        value, unit = found[i], I32(units[i])
        exponent = I32((value >> U32(23)) & U32(255))
        above = I32(exponent - unit)
        there = _place(value, unit)
        step = there - _place(foretold[i], unit)
        if above > I32(MANTISSA) or step > I32(FARTHEST) or step < I32(-FARTHEST):
            symbols[i] = 0
            at, word, held = _put(bits, at, word, held, value, 32)
            continue
        symbols[i] = U8(step + I32(MIDDLE))
        if above >= I32(0):
            left = MANTISSA - above
            at, word, held = _put(bits, at, word, held, value & U32((U32(1) << U32(left)) - U32(1)), left)
        elif value & U32(0x7FFFFFFF):
            depths[many] = U8(unit - I32(1) - exponent)
            many += 1
            raw = (value & U32(0x7FFFFF)) | ((value >> U32(31)) << U32(23))
            at, word, held = _put(bits, at, word, held, raw, 24)
        else:
            depths[many] = MINUS_ZERO if value else PLUS_ZERO
            many += 1
    return (many << 40) + 8 * at + held


@part
def _from_symbols(foretold, units, symbols, lefts, out):
    """All but the bits that are stored of each value, and how many these are. False if a mantissa has none left."""
    worst = I32(0)
    for i in range(out.size):
        unit, symbol = I32(units[i]), I32(symbols[i])
        there = I32(_place(foretold[i], unit) + I32(symbol - I32(MIDDLE)))
        size = I32(-there) if there < I32(0) else there
        above = I32(I32(np.float32(size).view(np.uint32) >> U32(23)) - I32(127))
        far, small = symbol == I32(0), there == I32(0)
        left = I32(I32(MANTISSA) - above)
        worst = I32(worst | (I32(0) if far or small else left))
        kept = I32(left & I32(31))
        mantissa = U32(U32(U32(size) << U32(kept)) & U32(0x7FFFFF))
        exponent = U32(U32(I32(unit + above) & I32(255)) << U32(23))
        sign = U32(0x80000000) if there < I32(0) else U32(0)
        out[i] = U32(0) if far or small else U32(U32(sign | exponent) | mantissa)
        lefts[i] = U8(FAR if far else (SMALL if small else kept))
    return worst >= I32(0)


@kernel(types.boolean, WORDS32, BYTES, BYTES, BYTES, BYTES, OUT, OUT32)
def from_grid(foretold, units, symbols, depths, bits, lefts, out):
    """The words again; False if depths or bits are too few or too many. `lefts` is room for a byte a value."""
    if not _from_symbols(foretold, units, symbols, lefts, out):
        return False
    used, at, last = 0, 0, 8 * (bits.size - 8)
    for i in range(out.size):
        if at > last:
            return False
        left = types.intp(lefts[i])
        word = load64(bits, at >> 3) >> U64(at & 7)
        if left <= MANTISSA:
            out[i] |= U32(word) & U32((U32(1) << U32(left)) - U32(1))
            at += left
        elif left == FAR:
            out[i] = U32(word)
            at += 32
        else:
            if used >= depths.size:
                return False
            depth = depths[used]
            used += 1
            if depth >= MINUS_ZERO:
                out[i] = U32(0x80000000) if depth == MINUS_ZERO else U32(0)
            else:
                raw = U32(word)
                exponent = U32((I32(units[i]) - I32(1) - I32(depth)) & I32(255))
                out[i] = ((raw & U32(0x800000)) << U32(8)) | (exponent << U32(23)) | (raw & U32(0x7FFFFF))
                at += 24
    return used == depths.size and (at + 7) >> 3 == bits.size - 8
