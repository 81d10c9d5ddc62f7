# mypy: ignore-errors
"""Planes that are mostly zero, as version 0.3.0 wrote them; docs/delta-codecs.md has the arithmetic.

The interval is that of two words of 32 bits, and needs no carry: bytes leave it as soon as both ends agree on them.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, OUT, kernel, part

I64, U64 = types.int64, types.uint64
SIZES = types.Array(types.int64, 1, "C", readonly=True)
HALF, LEAST, SLOWEST = 1 << 15, 32, 255
FLAGS, VALUES, VALUE_MODELS, GAPS, MODELS = 0, 16, 40, 656, 817
DENSE = 255
TOLD = 2


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
