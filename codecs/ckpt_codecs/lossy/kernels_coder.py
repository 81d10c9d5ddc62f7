# mypy: ignore-errors
"""The compiled coder of symbols: see `ckpt_codecs.lossy.symbols`, and `portable_coder` for the same without Numba.

`kernels_decoder` is its other half. Chances need no clipping: below 16 and 128 the two numbers of a chance no longer
shrink, nor do they grow above 2^15 less that. Indices are unsigned in the innermost loops, since Numba allows for
negative ones elsewhere.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import OUT, SIZE, kernel, part
from ckpt_codecs.lossy import model

_UNARY, _GROUP = model.UNARY, model.GROUP
_ZERO, _MORE, _PROBABILITIES = model.ZERO, model.MORE, model.PROBABILITIES
_HALF, _ONE, _FAST, _SLOW = model.HALF, 2 * model.HALF, model.FAST, model.SLOW
_MOST, _SEEN, _LOWEST = model.MOST_SEEN, model.SEEN, model.LOWEST
_MOST_RECORDS = 112
"""Of one symbol, at the very most; a group's own included."""

# A group's columns are 16 bits each, eight to two words, which are then computed with at once. Columns that fill the
# last group up stay 0, and change nothing.
_4, _16, _32, _WORD = np.uint64(4), np.uint64(16), np.uint64(32), np.uint64(0xFFFFFFFF)
_LOW, _FIFTEENS, _TWELVES = np.uint64(0x0000FFFF0000FFFF), np.uint64(0x000F000F000F000F), np.uint64(0x0FFF0FFF0FFF0FFF)

SYMBOLS = types.Array(types.int32, 1, "C", readonly=True)
RECORDS = types.Array(types.uint16, 1, "C")
TABLE = types.Array(types.uint8, 1, "C", readonly=True)


@part
def seen(lanes, group):
    """The sum of the group's columns: eight numbers below 2^15 in two words."""
    a, b = lanes[types.uint64(2 * group)], lanes[types.uint64(2 * group + 1)]
    pairs = (a & _LOW) + (b & _LOW) + ((a >> _16) & _LOW) + ((b >> _16) & _LOW)
    return types.int64((pairs + (pairs >> _32)) & _WORD)


@part
def fade(lanes, group):
    """What was seen in the group's columns shrinks by (itself + 15) >> 4."""
    for i in range(types.uint64(2 * group), types.uint64(2 * group + 2)):
        word = lanes[i]
        lanes[i] = word - (((word + _FIFTEENS) >> _4) & _TWELVES)


@part
def _note(fast, slow, i, bit, records, at):
    """A decision with its chance, from which is learnt without a branch."""
    a, b = types.int64(fast[i]), types.int64(slow[i])
    records[types.uint64(at)] = types.uint16((a + b) >> 1 | bit << 15)
    fast[i] = types.uint16(a - (a >> _FAST) if bit else a + ((_ONE - a) >> _FAST))
    slow[i] = types.uint16(b - (b >> _SLOW) if bit else b + ((_ONE - b) >> _SLOW))
    return at + 1


@part
def _note_raw(value, bits, records, at):
    for b in range(bits - 1, -1, -1):
        records[types.uint64(at)] = types.uint16(_HALF | (((value >> b) & 1) << 15))
        at += 1
    return at


@part
def _note_more(fast, slow, c, high, records, at):
    """How far a number goes beyond 1."""
    base = _MORE + c * _UNARY - 1
    for k in range(1, min(high, _UNARY + 1)):
        at = _note(fast, slow, types.uint64(base + k), 1, records, at)
    if high <= _UNARY:
        return _note(fast, slow, types.uint64(base + high), 0, records, at)
    rest, bits = high - _UNARY, 0
    while rest >> (bits + 1):
        bits += 1
    at = _note_raw((1 << bits) - 1, bits, records, at)
    at = _note_raw(0, 1, records, at)
    return _note_raw(rest, bits, records, at)


@kernel(SIZE, SYMBOLS, SIZE, SIZE, TABLE, RECORDS)
def note(symbols, columns, shift, table, records):
    """The decisions that tell the symbols, each with its probability; -1 if there is too little room."""
    fast, slow = np.full(_PROBABILITIES, _HALF, np.uint16), np.full(_PROBABILITIES, _HALF, np.uint16)
    lanes = np.zeros((columns + _GROUP - 1) // _GROUP * 2, np.uint64)
    column = lanes.view(np.uint16)
    row, at, size = 0, 0, symbols.size
    for start in range(0, size, columns):
        width = min(columns, size - start)
        for j in range(types.uint64(width), types.uint64(columns)):
            column[j] = 0  # a last row that is shorter: its last group has no more columns
        for left in range(0, width, _GROUP):
            right = min(left + _GROUP, width)
            if records.size - at < _GROUP * _MOST_RECORDS:
                return -1
            if right - left > 1:
                any_ = 0
                if right - left == _GROUP:
                    for j in range(_GROUP):
                        any_ |= abs(types.int64(symbols[types.uint64(start + left + j)]))
                else:
                    for j in range(start + left, start + right):
                        any_ |= abs(types.int64(symbols[types.uint64(j)]))
                any_ = types.int64(any_ >> shift > 0)
                group = left // _GROUP
                c = types.uint64(table[types.uint64(((seen(lanes, group) >> 3) + row) >> 3)])
                at = _note(fast, slow, c, any_, records, at)
                if not any_ and not shift:
                    fade(lanes, group)
                    row -= (row * 103) >> 8
                    continue
            for j in range(types.uint64(left), types.uint64(right)):
                symbol, before = types.int64(symbols[types.uint64(start) + j]), types.int64(column[j])
                magnitude = abs(symbol)
                high = magnitude >> shift
                c = types.int64(table[types.uint64((before + row) >> 3)])
                at = _note(fast, slow, types.uint64(_ZERO + c), types.int64(high > 0), records, at)
                if high:
                    at = _note_more(fast, slow, c, high, records, at)
                if shift:
                    at = _note_raw(magnitude, shift, records, at)
                if magnitude:
                    at = _note_raw(types.int64(symbol < 0), 1, records, at)
                found = min(high, _MOST) << _SEEN
                column[j] = types.uint16(before + ((found - before) >> 4))
                row += (found - row) >> 4
    return at


@kernel(SIZE, RECORDS, SIZE, OUT)
def write(records, many, out):
    """Code the decisions from the last to the first, from the end of `out`; where the code begins, -1 without room."""
    if not 0 <= many <= records.size or out.size < 4 + 2 * many:
        return -1
    state, at = types.uint32(_LOWEST), types.uint64(out.size)
    for i in range(many - 1, -1, -1):
        record = types.uint32(records[types.uint64(i)])
        chance, bit = record & types.uint32(32767), record >> types.uint32(15)
        share = types.uint32(_ONE) - chance if bit else chance
        if state >> types.uint32(17) >= share:
            at -= types.uint64(2)
            out[at], out[at + types.uint64(1)] = (
                types.uint8(state & types.uint32(255)),
                types.uint8((state >> types.uint32(8)) & types.uint32(255)),
            )
            state = state >> types.uint32(16)
        times_ = types.uint32(state // share)
        first = chance if bit else types.uint32(0)
        state = types.uint32((times_ << types.uint32(15)) + (state - times_ * share) + first)
    at -= types.uint64(4)
    for b in range(4):
        out[at + types.uint64(b)] = types.uint8((types.int64(state) >> (8 * b)) & 255)
    return types.int64(at)
