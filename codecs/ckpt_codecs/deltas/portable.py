"""What delta codecs are made of, in NumPy: the same bits as the kernels, slowly."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.deltas.packing import packed, unpacked
from ckpt_codecs.deltas.portable_arithmetic import (
    carried,
    descended,
    first,
    gradients,
    halves,
    mixed,
    scaled,
    second,
    weights_apex,
    weights_cpu_adam,
    weights_divided,
    weights_torch,
)
from ckpt_codecs.deltas.portable_changes import find_changes, read_changes, write_changes
from ckpt_codecs.deltas.portable_seldom import read_seldom
from ckpt_codecs.deltas.portable_tables import read_rows, read_steps, tally_steps, write_rows, write_steps

__all__ = [
    "buckets",
    "carried",
    "count",
    "descended",
    "drifted",
    "find_changes",
    "first",
    "from_grid",
    "gather",
    "gradients",
    "growth_contexts",
    "halves",
    "mixed",
    "read_changes",
    "read_rows",
    "read_seldom",
    "read_steps",
    "root_units",
    "scaled",
    "scatter",
    "second",
    "stepped",
    "steps",
    "tally_steps",
    "to_grid",
    "weights_apex",
    "weights_cpu_adam",
    "weights_divided",
    "weights_torch",
    "widest_step",
    "write_changes",
    "write_rows",
    "write_steps",
]


def widest_step(before: Array, after: Array) -> int:
    return int(np.bitwise_or.reduce(_zigzag(before, after))) if before.size else 0


def steps(before: Array, after: Array, parts: list[Array]) -> None:
    made = _zigzag(before, after).view(np.uint8).reshape(before.size, before.itemsize)
    for i, part in enumerate(parts):
        part[:] = made[:, i]


def stepped(before: Array, parts: list[Array], out: Array) -> None:
    made = np.zeros((before.size, before.itemsize), np.uint8)
    for i, part in enumerate(parts):
        made[:, i] = part
    word = made.reshape(-1).view(before.dtype)
    one = before.dtype.type(1)
    out[:] = before + ((word >> one) ^ (~(word & one) + one))


def _zigzag(before: Array, after: Array) -> Array:
    """Differences modulo the width, small ones of either sign as small numbers."""
    width = before.itemsize
    step = (after - before).view(f"i{width}")
    made: Array = ((step << 1) ^ (step >> (8 * width - 1))).view(f"u{width}")
    return made


MANTISSA, MIDDLE, FARTHEST = 23, 127, 126
PLUS_ZERO, MINUS_ZERO = 255, 254


def to_grid(foretold: Array, found: Array, units: Array) -> tuple[Array, Array, Array]:
    unit = units.astype(np.int64)
    exponent = (found >> np.uint32(23) & np.uint32(255)).astype(np.int64)
    above = exponent - unit
    step = _place(found, unit) - _place(foretold, unit)
    far = (above > MANTISSA) | (np.abs(step) > FARTHEST)
    symbols = np.where(far, 0, step + MIDDLE).astype(np.uint8)
    inside, below = ~far & (above >= 0), ~far & (above < 0)
    zero = below & (found & np.uint32(0x7FFFFFFF) == 0)
    many = np.where(far, 32, np.where(inside, MANTISSA - above, np.where(zero, 0, 24)))
    low = found & ((np.uint64(1) << np.where(inside, many, 0).astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
    signed = found & np.uint32(0x7FFFFF) | found >> np.uint32(31) << np.uint32(23)
    raw = np.where(far, found, np.where(inside, low, signed))
    deep = np.where(zero, np.where(found != 0, MINUS_ZERO, PLUS_ZERO), unit - 1 - exponent)
    return symbols, deep[below].astype(np.uint8), packed(raw, many)


def from_grid(foretold: Array, units: Array, symbols: Array, depths: Array, bits: Array, out: Array) -> bool:
    unit = units.astype(np.int64)
    there = _place(foretold, unit) + symbols - MIDDLE
    far = symbols == 0
    inside, below = ~far & (there != 0), ~far & (there == 0)
    if np.count_nonzero(below) != depths.size:
        return False
    depth = np.zeros(out.size, np.int64)
    depth[below] = depths
    size = np.abs(there)
    above = np.frexp(np.maximum(size, 1).astype(np.float64))[1].astype(np.int64) - 1
    if (inside & (above > MANTISSA)).any():
        return False
    left = np.clip(MANTISSA - above, 0, MANTISSA)
    many = np.where(far, 32, np.where(inside, left, np.where(depth >= MINUS_ZERO, 0, 24)))
    if (int(many.sum()) + 7) >> 3 != bits.size - 8:
        return False
    raw = unpacked(bits, many)
    sign = np.where(there < 0, 1 << 31, 0)
    mantissa = size << left & 0x7FFFFF | raw & ((1 << left) - 1)
    on_grid = sign | (unit + above & 255) << 23 | mantissa
    small = (raw & 0x800000) << 8 | (unit - 1 - depth & 255) << 23 | raw & 0x7FFFFF
    zero = np.where(depth == MINUS_ZERO, 1 << 31, 0)
    out[:] = np.where(far, raw, np.where(inside, on_grid, np.where(depth >= MINUS_ZERO, zero, small)))
    return True


def buckets(words: Array, mantissa: int, least: int, many: int) -> Array:
    exponent = (words & np.uint16(0x7FFF)) >> np.uint16(mantissa)
    made: Array = np.clip(exponent.astype(np.int16) - np.int16(least), 0, many - 1).astype(np.uint8)
    return made


def count(contexts: Array, many: int) -> Array:
    return np.bincount(contexts, minlength=many)


def gather(contexts: Array, plane: Array, out: Array) -> None:
    out[:] = plane[np.argsort(contexts, kind="stable")]


def scatter(contexts: Array, plane: Array, out: Array) -> None:
    out[np.argsort(contexts, kind="stable")] = plane


def root_units(second: Array, shift: int) -> Array:
    root = (second >> np.uint32(23) & np.uint32(255)).astype(np.int32) + 127 >> 1
    made: Array = np.clip(root + shift, 1, 254).astype(np.uint8)
    return made


def growth_contexts(before: Array, after: Array, least: int, many: int) -> Array:
    made: Array = np.clip(((after - before).view(np.int32) >> 21) - least, 0, many - 1).astype(np.uint8)
    return made


def drifted(words: Array, rows: Array, columns: Array) -> Array:
    way = rows.astype(np.int32)[:, None] + columns.astype(np.int32) << 19
    made: Array = (words.reshape(way.shape) + way.view(np.uint32)).reshape(-1)
    return made


def _place(word: Array, unit: Array) -> Array:
    """How many units a value has, whole ones, with its sign; 0 also where a mantissa could not tell."""
    above = (word >> np.uint32(23) & np.uint32(255)).astype(np.int64) - unit
    inside = (above >= 0) & (above <= MANTISSA)
    mantissa = (word & np.uint32(0x7FFFFF) | np.uint32(0x800000)).astype(np.int64)
    units = np.where(inside, mantissa >> np.clip(MANTISSA - above, 0, MANTISSA), 0)
    return np.where(word >> np.uint32(31) != 0, -units, units)
