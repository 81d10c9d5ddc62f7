"""The twin of `float32_grid.c`: words of float32 on a grid of its own for each value."""

import numpy as np

from ckpt_codecs.base import Array
from oracle.bit_packing import PADDING, pack, unpack

MANTISSA, MIDDLE, FARTHEST = 23, 127, 126
PLUS_ZERO, MINUS_ZERO = 255, 254


def to_grid(predicted: Array, actual: Array, units: Array) -> tuple[Array, Array, Array]:
    unit = units.astype(np.int64)
    exponent = (actual >> np.uint32(23) & np.uint32(255)).astype(np.int64)
    above = exponent - unit
    step = units_of(actual, unit) - units_of(predicted, unit)
    far = (above > MANTISSA) | (np.abs(step) > FARTHEST)
    symbols = np.where(far, 0, step + MIDDLE).astype(np.uint8)
    inside, below = ~far & (above >= 0), ~far & (above < 0)
    zero = below & (actual & np.uint32(0x7FFFFFFF) == 0)
    widths = np.where(far, 32, np.where(inside, MANTISSA - above, np.where(zero, 0, 24)))
    low = actual & ((np.uint64(1) << np.where(inside, widths, 0).astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
    signed = actual & np.uint32(0x7FFFFF) | actual >> np.uint32(31) << np.uint32(23)
    raw = np.where(far, actual, np.where(inside, low, signed))
    depth = np.where(zero, np.where(actual != 0, MINUS_ZERO, PLUS_ZERO), unit - 1 - exponent)
    return symbols, depth[below].astype(np.uint8), pack(raw, widths)


def from_grid(predicted: Array, units: Array, symbols: Array, depths: Array, bits: Array, out: Array) -> bool:
    unit = units.astype(np.int64)
    place = units_of(predicted, unit) + symbols - MIDDLE
    far = symbols == 0
    inside, below = ~far & (place != 0), ~far & (place == 0)
    if np.count_nonzero(below) != depths.size:
        return False
    depth = np.zeros(out.size, np.int64)
    depth[below] = depths
    size = np.abs(place)
    above = np.frexp(np.maximum(size, 1).astype(np.float64))[1].astype(np.int64) - 1
    if (inside & (above > MANTISSA)).any():
        return False
    left = np.clip(MANTISSA - above, 0, MANTISSA)
    widths = np.where(far, 32, np.where(inside, left, np.where(depth >= MINUS_ZERO, 0, 24)))
    if (int(widths.sum()) + 7) >> 3 != bits.size - PADDING:
        return False
    raw = unpack(bits, widths)
    sign = np.where(place < 0, 1 << 31, 0)
    mantissa = size << left & 0x7FFFFF | raw & ((1 << left) - 1)
    on_grid = sign | (unit + above & 255) << 23 | mantissa
    small = (raw & 0x800000) << 8 | (unit - 1 - depth & 255) << 23 | raw & 0x7FFFFF
    zero = np.where(depth == MINUS_ZERO, 1 << 31, 0)
    out[:] = np.where(far, raw, np.where(inside, on_grid, np.where(depth >= MINUS_ZERO, zero, small)))
    return True


def units_of(word: Array, unit: Array) -> Array:
    """How many whole units a value has, with its sign; 0 also where its exponent is out of the grid's range."""
    above = (word >> np.uint32(23) & np.uint32(255)).astype(np.int64) - unit
    inside = (above >= 0) & (above <= MANTISSA)
    mantissa = (word & np.uint32(0x7FFFFF) | np.uint32(0x800000)).astype(np.int64)
    units = np.where(inside, mantissa >> np.clip(MANTISSA - above, 0, MANTISSA), 0)
    return np.where(word >> np.uint32(31) != 0, -units, units)
