# mypy: ignore-errors
"""Floats on a grid of one's own for each value; docs/delta-codecs.md has the arithmetic.

A stream of bits has eight bytes more than it needs, so that every word of it can be loaded and stored whole.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, OUT, OUT32, SIZE, WORDS32, kernel, part
from ckpt_codecs.kernels.memory import load64, store64

I32, I64, U8, U32, U64 = types.int32, types.int64, types.uint8, types.uint32, types.uint64
MANTISSA = 23
MIDDLE = 127
FARTHEST = 126
PLUS_ZERO, MINUS_ZERO = 255, 254
FAR, SMALL = 32, 33
SMALL_ONE = 64
BLOCK = 1024


@part
def _place(word, unit):
    """How many units a value has, whole ones, with its sign; 0 also where a mantissa could not tell."""
    above = I32(I32((word >> U32(23)) & U32(255)) - unit)
    inside = (above >= I32(0)) & (above <= I32(MANTISSA))
    mantissa = I32((word & U32(0x7FFFFF)) | U32(0x800000))
    units = I32(mantissa >> I32(MANTISSA - above)) if inside else I32(0)
    return I32(-units) if word >> U32(31) else units


@part
def _to_symbols(foretold, found, units, symbols, raws, lefts):
    """Symbols; the bits that each leaves, and how many, `SMALL_ONE` more where a depth is told."""
    for j in range(symbols.size):
        value, unit = found[j], I32(units[j])
        above = I32(I32((value >> U32(23)) & U32(255)) - unit)
        step = I32(_place(value, unit) - _place(foretold[j], unit))
        far = (above > I32(MANTISSA)) | (step > I32(FARTHEST)) | (step < I32(-FARTHEST))
        small = above < I32(0)
        left = I32(I32(I32(MANTISSA) - above) & I32(31))
        below = U32(value & U32(U32(U32(1) << U32(left)) - U32(1)))
        signed = U32(U32(value & U32(0x7FFFFF)) | U32(U32(value >> U32(31)) << U32(23)))
        zero = U32(value & U32(0x7FFFFFFF)) == U32(0)
        symbols[j] = U8(0) if far else U8(step + I32(MIDDLE))
        raws[j] = value if far else ((U32(0) if zero else signed) if small else below)
        lefts[j] = U8(FAR) if far else ((U8(SMALL_ONE) if zero else U8(SMALL_ONE + 24)) if small else U8(left))


@kernel(SIZE, WORDS32, WORDS32, BYTES, OUT, OUT, OUT)
def to_grid(foretold, found, units, symbols, depths, bits):
    """Fill symbols; returns how many depths there are, times 2^40, plus how many bits.

    `bits` has room for 4 bytes a value, and 8.
    """
    many, at, held, word = U64(0), U64(0), U64(0), U64(0)
    raws, lefts = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint8)
    for start in range(0, found.size, BLOCK):
        stop = min(start + BLOCK, found.size)
        _to_symbols(foretold[start:stop], found[start:stop], units[start:stop], symbols[start:stop], raws, lefts)
        for j in range(U64(0), U64(stop - start)):
            left = U64(lefts[j])
            if left >= U64(SMALL_ONE):
                value = found[U64(start) + j]
                exponent = I32((value >> U32(23)) & U32(255))
                zero = MINUS_ZERO if value else PLUS_ZERO
                depth = U8(I32(units[U64(start) + j]) - I32(1) - exponent)
                depths[many] = depth if value & U32(0x7FFFFFFF) else zero
                many += U64(1)
                left -= U64(SMALL_ONE)
            word |= U64(raws[j]) << held
            store64(bits, I64(at), word)
            held += left
            at += held >> U64(3)
            word >>= held & U64(56)
            held &= U64(7)
    return I64((many << U64(40)) + U64(8) * at + held)


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
