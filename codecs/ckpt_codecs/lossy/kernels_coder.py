# mypy: ignore-errors
"""The compiled coder of symbols: see `ckpt_codecs.lossy.symbols`, and `portable_coder` for the same without Numba."""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, OUT, SIZE, kernel, part
from ckpt_codecs.lossy import model

_TABLE = model.context_table()
_UNARY, _GROUP, _CONTEXTS = model.UNARY, model.GROUP, model.CONTEXTS
_ZERO, _MORE, _PROBABILITIES = model.ZERO, model.MORE, model.PROBABILITIES
_HALF, _LEAST, _FAST, _SLOW = model.HALF, model.LEAST, model.FAST, model.SLOW
_MOST, _SEEN, _LONGEST, _LOWEST = model.MOST_SEEN, model.SEEN, model.LONGEST, model.LOWEST

SYMBOLS = types.Array(types.int32, 1, "C", readonly=True)
OUT_SYMBOLS = types.Array(types.int32, 1, "C")
RECORDS = types.Array(types.uint16, 1, "C")
TABLE = types.Array(types.int64, 1, "C", readonly=True)


@part
def _chance(p, i):
    """The probability of a 0, in 2^15 parts."""
    return min(max((p[i, 0] + p[i, 1]) >> 1, _LEAST), 2 * _HALF - _LEAST)


@part
def _learn(p, i, bit):
    if bit:
        p[i, 0] -= p[i, 0] >> _FAST
        p[i, 1] -= p[i, 1] >> _SLOW
    else:
        p[i, 0] += (2 * _HALF - p[i, 0]) >> _FAST
        p[i, 1] += (2 * _HALF - p[i, 1]) >> _SLOW


@part
def _note(p, i, bit, records, at):
    records[at] = _chance(p, i) | (bit << 15)
    _learn(p, i, bit)
    return at + 1


@part
def _note_raw(value, bits, records, at):
    for b in range(bits - 1, -1, -1):
        records[at] = _HALF | (((value >> b) & 1) << 15)
        at += 1
    return at


@part
def _note_symbol(p, c, symbol, shift, records, at):
    magnitude = abs(types.int64(symbol))
    high = magnitude >> shift
    at = _note(p, _ZERO + c, types.int64(high > 0), records, at)
    if high:
        k = 1
        while k <= _UNARY:
            more = types.int64(high > k)
            at = _note(p, _MORE + c * _UNARY + k - 1, more, records, at)
            if not more:
                break
            k += 1
        if high > _UNARY:
            rest, bits = high - _UNARY, 0
            while rest >> (bits + 1):
                bits += 1
            at = _note_raw((1 << bits) - 1, bits, records, at)
            at = _note_raw(0, 1, records, at)
            at = _note_raw(rest, bits, records, at)
    at = _note_raw(magnitude, shift, records, at)
    if magnitude:
        at = _note_raw(types.int64(symbol < 0), 1, records, at)
    return at


@kernel(SIZE, SYMBOLS, SIZE, SIZE, TABLE, RECORDS)
def note(symbols, columns, shift, table, records):
    """The decisions that tell the symbols, each with its probability; -1 if there is too little room."""
    p = np.full((_PROBABILITIES, 2), _HALF, np.int64)
    column = np.zeros(columns, np.int64)
    row, at, size = 0, 0, symbols.size
    for start in range(0, size, columns):
        for left in range(0, min(columns, size - start), _GROUP):
            right = min(left + _GROUP, columns, size - start)
            if records.size - at < (right - left) * 110 + 1:
                return -1
            seen, any_ = 0, 0
            for j in range(left, right):
                seen += column[j]
                if abs(types.int64(symbols[start + j])) >> shift:
                    any_ = 1
            if right - left > 1:
                at = _note(p, table[((seen >> 3) + row) >> 3], any_, records, at)
            if not any_ and right - left > 1 and not shift:
                for j in range(left, right):
                    column[j] -= (column[j] + 15) >> 4
                row -= (row * 103) >> 8
                continue
            for j in range(left, right):
                symbol = symbols[start + j]
                at = _note_symbol(p, table[(column[j] + row) >> 3], symbol, shift, records, at)
                found = min(abs(types.int64(symbol)) >> shift, _MOST) << _SEEN
                column[j] += (found - column[j]) >> 4
                row += (found - row) >> 4
    return at


@kernel(SIZE, RECORDS, SIZE, OUT)
def write(records, many, out):
    """Code the decisions from the last to the first, from the end of `out`; where the code begins, -1 without room."""
    state, at = types.int64(_LOWEST), out.size
    for i in range(many - 1, -1, -1):
        chance, bit = types.int64(records[i]) & 32767, types.int64(records[i]) >> 15
        part_ = 32768 - chance if bit else chance
        if state >= part_ << 17:
            if at < 2:
                return -1
            at -= 2
            out[at], out[at + 1] = types.uint8(state & 255), types.uint8((state >> 8) & 255)
            state >>= 16
        state = ((state // part_) << 15) + state % part_ + (chance if bit else 0)
    if at < 4:
        return -1
    at -= 4
    for b in range(4):
        out[at + b] = types.uint8((state >> (8 * b)) & 255)
    return at


@part
def _take(state, at, data, chance):
    """A decision: the state after it, where the code goes on, the bit. Past the end, zeros are read."""
    low = state & 32767
    if low < chance:
        state, bit = chance * (state >> 15) + low, 0
    else:
        state, bit = (32768 - chance) * (state >> 15) + low - chance, 1
    if state < _LOWEST:
        state <<= 16
        if at + 2 <= data.size:
            state |= types.int64(data[at]) | (types.int64(data[at + 1]) << 8)
        at += 2
    return state, at, bit


@part
def _take_raw(state, at, data, bits):
    value = 0
    for _ in range(bits):
        state, at, bit = _take(state, at, data, _HALF)
        value = value << 1 | bit
    return state, at, value


@kernel(types.boolean, BYTES, SIZE, SIZE, TABLE, OUT_SYMBOLS)
def read(data, columns, shift, table, symbols):
    """Fill `symbols`; False if the code is not that of so many symbols."""
    p = np.full((_PROBABILITIES, 2), _HALF, np.int64)
    column = np.zeros(columns, np.int64)
    row, size = 0, symbols.size
    if data.size < 4:
        return False
    state = types.int64(data[0]) | types.int64(data[1]) << 8 | types.int64(data[2]) << 16 | types.int64(data[3]) << 24
    at = 4
    for start in range(0, size, columns):
        if at > data.size:
            return False
        for left in range(0, min(columns, size - start), _GROUP):
            right = min(left + _GROUP, columns, size - start)
            if right - left > 1:
                seen = 0
                for j in range(left, right):
                    seen += column[j]
                c = table[((seen >> 3) + row) >> 3]
                state, at, any_ = _take(state, at, data, _chance(p, c))
                _learn(p, c, any_)
                if not any_ and not shift:
                    for j in range(left, right):
                        column[j] -= (column[j] + 15) >> 4
                        symbols[start + j] = 0
                    row -= (row * 103) >> 8
                    continue
            for j in range(left, right):
                c = table[(column[j] + row) >> 3]
                state, at, more = _take(state, at, data, _chance(p, _ZERO + c))
                _learn(p, _ZERO + c, more)
                high = more
                while more and high <= _UNARY:
                    i = _MORE + c * _UNARY + high - 1
                    state, at, more = _take(state, at, data, _chance(p, i))
                    _learn(p, i, more)
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
                state, at, low = _take_raw(state, at, data, shift)
                magnitude = high << shift | low
                if magnitude >= 1 << 31:
                    return False
                if magnitude:
                    state, at, bit = _take(state, at, data, _HALF)
                    symbols[start + j] = -magnitude if bit else magnitude
                else:
                    symbols[start + j] = 0
                found = min(high, _MOST) << _SEEN
                column[j] += (found - column[j]) >> 4
                row += (found - row) >> 4
    return at == data.size and state == _LOWEST
