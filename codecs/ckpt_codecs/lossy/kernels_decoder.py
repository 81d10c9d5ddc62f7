# mypy: ignore-errors
"""The compiled decoder of symbols: see `kernels_coder`.

Decisions are branches, which the processor foretells better the less they tell; but signs and raw bits are half and
half, and so are computed.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, SIZE, kernel, part
from ckpt_codecs.lossy import model
from ckpt_codecs.lossy.kernels_coder import TABLE, fade, seen

_UNARY, _GROUP = model.UNARY, model.GROUP
_ZERO, _MORE, _PROBABILITIES = model.ZERO, model.MORE, model.PROBABILITIES
_HALF, _ONE, _FAST, _SLOW = model.HALF, 2 * model.HALF, model.FAST, model.SLOW
_MOST, _SEEN, _LONGEST, _LOWEST = model.MOST_SEEN, model.SEEN, model.LONGEST, model.LOWEST

OUT_SYMBOLS = types.Array(types.int32, 1, "C")


@part
def _take(state, at, data, chance):
    """A decision: the state after it, where the code goes on, the bit. Past the end, zeros are read."""
    low, rest = state & 32767, state >> 15
    if low < chance:
        state, bit = chance * rest + low, 0
    else:
        state, bit = (_ONE - chance) * rest + low - chance, 1
    if state < _LOWEST:
        state, at = _refill(state, at, data)
    return state, at, bit


@part
def _refill(state, at, data):
    state <<= 16
    if at + 2 <= data.size:
        state |= types.int64(data[types.uint64(at)]) | (types.int64(data[types.uint64(at + 1)]) << 8)
    return state, at + 2


@part
def _take_raw(state, at, data, bits):
    value = 0
    for _ in range(bits):
        value = value << 1 | (state >> 14) & 1
        state = state >> 15 << 14 | state & 16383
        if state < _LOWEST:
            state, at = _refill(state, at, data)
    return state, at, value


@part
def _take_learnt(state, at, data, fast, slow, i):
    """A decision by what was learnt, and from which is learnt."""
    a, b = types.int64(fast[i]), types.int64(slow[i])
    chance, low, rest = (a + b) >> 1, state & 32767, state >> 15
    if low < chance:
        state, bit = chance * rest + low, 0
        fast[i], slow[i] = types.uint16(a + ((_ONE - a) >> _FAST)), types.uint16(b + ((_ONE - b) >> _SLOW))
    else:
        state, bit = (_ONE - chance) * rest + low - chance, 1
        fast[i], slow[i] = types.uint16(a - (a >> _FAST)), types.uint16(b - (b >> _SLOW))
    if state < _LOWEST:
        state, at = _refill(state, at, data)
    return state, at, bit


@kernel(types.boolean, BYTES, SIZE, SIZE, TABLE, OUT_SYMBOLS)
def read(data, columns, shift, table, symbols):
    """Fill `symbols`; False if the code is not that of so many symbols."""
    fast, slow = np.full(_PROBABILITIES, _HALF, np.uint16), np.full(_PROBABILITIES, _HALF, np.uint16)
    lanes = np.zeros((columns + _GROUP - 1) // _GROUP * 2, np.uint64)
    column = lanes.view(np.uint16)
    row, size = 0, symbols.size
    if data.size < 4:
        return False
    state = types.int64(data[0]) | types.int64(data[1]) << 8 | types.int64(data[2]) << 16 | types.int64(data[3]) << 24
    at = 4
    symbols[:] = 0
    for start in range(0, size, columns):
        if at > data.size:
            return False
        width = min(columns, size - start)
        for j in range(types.uint64(width), types.uint64(columns)):
            column[j] = 0  # a last row that is shorter: its last group has no more columns
        for left in range(0, width, _GROUP):
            right = min(left + _GROUP, width)
            if right - left > 1:
                group = left // _GROUP
                c = types.uint64(table[types.uint64(((seen(lanes, group) >> 3) + row) >> 3)])
                state, at, any_ = _take_learnt(state, at, data, fast, slow, c)
                if not any_ and not shift:
                    fade(lanes, group)
                    row -= (row * 103) >> 8
                    continue
            for j in range(types.uint64(left), types.uint64(right)):
                before = types.int64(column[j])
                c = types.int64(table[types.uint64((before + row) >> 3)])
                state, at, more = _take_learnt(state, at, data, fast, slow, types.uint64(_ZERO + c))
                high = more
                while more and high <= _UNARY:
                    i = types.uint64(_MORE + c * _UNARY + high - 1)
                    state, at, more = _take_learnt(state, at, data, fast, slow, i)
                    high += more
                if high > _UNARY:
                    bits = 0
                    state, at, bit = _take(state, at, data, _HALF)
                    while bit:
                        bits += 1
                        if bits > _LONGEST:
                            return False
                        state, at, bit = _take(state, at, data, _HALF)
                    state, at, rest = _take_raw(state, at, data, bits)
                    high = _UNARY + (1 << bits | rest)
                magnitude = high
                if shift:
                    state, at, low = _take_raw(state, at, data, shift)
                    magnitude = high << shift | low
                    if magnitude >= 1 << 31:
                        return False
                if magnitude:
                    state, at, bit = _take_raw(state, at, data, 1)
                    symbols[types.uint64(start) + j] = types.int32((magnitude ^ -bit) + bit)
                found = min(high, _MOST) << _SEEN
                column[j] = types.uint16(before + ((found - before) >> 4))
                row += (found - row) >> 4
    return at == data.size and state == _LOWEST
