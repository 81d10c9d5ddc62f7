# mypy: ignore-errors
"""Planes that are mostly zero, by adaptive binary arithmetic coding; docs/delta-codecs.md has the arithmetic.

The interval is that of two words of 32 bits, and needs no carry: bytes leave it as soon as both ends agree on them.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, OUT, SIZE, kernel, part

I64, U64 = types.int64, types.uint64
SIZES = types.Array(types.int64, 1, "C", readonly=True)
HALF, LEAST, SLOWEST = 1 << 15, 32, 255
FLAGS, VALUES, VALUE_MODELS, GAPS, MODELS = 0, 16, 40, 656, 817
DENSE = 255
TOLD = 2


@part
def _bit(state, models, model, out, bit):
    """Encode one bit: `state` is the two ends of the interval and the place in `out`; False if `out` is full."""
    low, high = state[0], state[1]
    chance = models[model, 0]
    middle = low + U64((high - low) * U64(chance)) // U64(65536)
    if bit:
        high = middle
    else:
        low = middle + U64(1)
    while (low ^ high) >> U64(24) == U64(0):
        if state[2] >= U64(out.size):
            return False
        out[I64(state[2])] = high >> U64(24)
        state[2] += U64(1)
        low = (low << U64(8)) & U64(0xFFFFFFFF)
        high = ((high << U64(8)) & U64(0xFFFFFFFF)) | U64(255)
    state[0], state[1] = low, high
    _learn(models, model, bit)
    return True


@part
def _learn(models, model, bit):
    if model == MODELS - 1:
        return
    seen = models[model, 1]
    chance = models[model, 0]
    if bit:
        chance = min(chance + (65535 - chance) * 2 // (2 * seen + 3), 65536 - LEAST)
    else:
        chance = max(chance - chance * 2 // (2 * seen + 3), LEAST)
    models[model, 0] = chance
    models[model, 1] = min(seen + 1, SLOWEST)


@part
def _read(state, models, model, data):
    """Decode one bit: `state` is the two ends, the place in `data`, and the word from there."""
    low, high, word = state[0], state[1], state[3]
    middle = low + U64((high - low) * U64(models[model, 0])) // U64(65536)
    bit = word <= middle
    if bit:
        high = middle
    else:
        low = middle + U64(1)
    while (low ^ high) >> U64(24) == U64(0):
        low = (low << U64(8)) & U64(0xFFFFFFFF)
        high = ((high << U64(8)) & U64(0xFFFFFFFF)) | U64(255)
        byte = U64(data[I64(state[2])]) if state[2] < U64(data.size) else U64(0)
        word = ((word << U64(8)) & U64(0xFFFFFFFF)) | byte
        state[2] += U64(1)
    state[0], state[1], state[3] = low, high, word
    _learn(models, model, bit)
    return bit


@part
def _length(number):
    size = 0
    while number:
        number >>= 1
        size += 1
    return size


@part
def _write_number(state, models, base, most, number, out):
    """A number of 1 and more: how long it is, its highest bits by models, the rest evenly."""
    size = _length(number)
    for i in range(1, min(size, most)):
        if not _bit(state, models, base + i - 1, out, True):
            return False
    if size < most and not _bit(state, models, base + size - 1, out, False):
        return False
    prefix = 1
    for i in range(size - 2, -1, -1):
        bit = (number >> i) & 1
        told = size - 2 - i < TOLD
        model = base + most + 4 * (size - 1) + prefix if told else MODELS - 1
        if not _bit(state, models, model, out, bit == 1):
            return False
        prefix = 2 * prefix + bit if told else prefix
    return True


@part
def _read_number(state, models, base, most, data):
    size = 1
    while size < most and _read(state, models, base + size - 1, data):
        size += 1
    number, prefix = 1, 1
    for i in range(size - 2, -1, -1):
        told = size - 2 - i < TOLD
        model = base + most + 4 * (size - 1) + prefix if told else MODELS - 1
        bit = 1 if _read(state, models, model, data) else 0
        number = 2 * number + bit
        prefix = 2 * prefix + bit if told else prefix
    return number


@part
def _models():
    models = np.empty((MODELS, 2), np.int64)
    models[:, 0] = HALF
    models[:, 1] = 0
    return models


@part
def _write_gap(state, models, gap, shift, out):
    if not _write_number(state, models, GAPS, 32, (gap >> shift) + 1, out):
        return False
    for i in range(shift - 1, -1, -1):  # noqa: SIM110, Numba has no generators here
        if not _bit(state, models, MODELS - 1, out, (gap >> i) & 1 == 1):
            return False
    return True


@kernel(SIZE, BYTES, SIZES, BYTES, OUT)
def write_seldom(plane, counts, kinds, out):
    """The plane's contexts one after another. Returns how many bytes, 0 if they do not fit into `out`."""
    models, state = _models(), np.zeros(3, np.uint64)
    state[1] = U64(0xFFFFFFFF)
    at = 0
    for c in range(counts.size):
        values, end, gap = VALUES + VALUE_MODELS * c, at + counts[c], 0
        shift = I64(kinds[c])
        while at < end:
            value = I64(plane[at])
            at += 1
            if shift == DENSE:
                if not _bit(state, models, FLAGS + c, out, value != 0):
                    return 0
            elif value == 0:
                gap += 1
            else:
                if not _write_gap(state, models, gap, shift, out):
                    return 0
                gap = 0
            if value and not _write_number(state, models, values, 8, value, out):
                return 0
        if shift != DENSE and not _write_gap(state, models, gap, shift, out):
            return 0
    if state[2] + U64(4) > U64(out.size):
        return 0
    for i in range(4):
        out[I64(state[2]) + i] = (state[1] >> U64(24 - 8 * i)) & U64(255)
    return I64(state[2]) + 4


@kernel(types.boolean, BYTES, SIZES, BYTES, OUT)
def read_seldom(data, counts, kinds, plane):
    """Fill the plane, whose contexts have so many values; False if these are no bytes of one."""
    models, state = _models(), np.zeros(4, np.uint64)
    state[1] = U64(0xFFFFFFFF)
    for i in range(4):
        state[3] = (state[3] << U64(8)) | (U64(data[i]) if i < data.size else U64(0))
    state[2] = U64(4)
    plane[:] = 0
    at = 0
    for c in range(counts.size):
        values, end = VALUES + VALUE_MODELS * c, at + counts[c]
        shift = I64(kinds[c])
        while True:
            if shift == DENSE:
                if at == end:
                    break
                if not _read(state, models, FLAGS + c, data):
                    at += 1
                    continue
            else:
                gap = _read_number(state, models, GAPS, 32, data) - 1
                if gap > end - at:
                    return False
                for _ in range(shift):
                    gap = 2 * gap + (1 if _read(state, models, MODELS - 1, data) else 0)
                at += gap
                if at >= end:
                    break
            plane[at] = _read_number(state, models, values, 8, data)
            at += 1
        if at != end:
            return False
    return state[2] == U64(data.size)
