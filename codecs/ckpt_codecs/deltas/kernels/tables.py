# mypy: ignore-errors
"""Halves of which many change, by asymmetric numeral systems (Duda, 2013); docs/delta-codecs.md has the arithmetic.

Sixteen states take turns, so that none has to wait for its last symbol.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, COUNTS, OUT, OUT16, OUT32, SIZE, WORDS16, WORDS32, kernel, part
from ckpt_codecs.kernels.memory import load64, store64

I16, I64, U8, U16, U32, U64 = types.int16, types.int64, types.uint8, types.uint16, types.uint32, types.uint64
LANES = 16
WEIGHT_BITS = 12
WHOLE = 1 << WEIGHT_BITS
SLOTS = np.uint64(WHOLE - 1)
LEAST_STATE = np.uint64(1 << 16)
NEAR = 32
"""Steps below this have symbols of their own; others share one, two to an octave, by their highest two bits."""
NEAR_BITS = 5
FIRST_FAR = 2 * NEAR - 1
FAR = 255
SYMBOLS = 108


@part
def _log2(number):
    size = I64(0)
    while number > 1:
        number >>= 1
        size += 1
    return size


@part
def _symbols(foretold, found, which, told):
    """Of each value its bucket, and its symbol, or `FAR`."""
    for i in range(told.size):
        step = I16(U16(found[i] - foretold[i]))
        size = U16(I16(-step) if step < I16(0) else step)
        symbol = U16(U16(size + size) - (U16(1) if step > I16(0) else U16(0)))
        told[i] = U16(U16(U16(which[i]) << U16(8)) | (symbol if size < U16(NEAR) else U16(FAR)))


@kernel(SIZE, WORDS16, WORDS16, BYTES, OUT16, COUNTS, OUT)
def tally(foretold, found, which, told, counts, bits):
    """Of each value its bucket and its symbol; how often they occur; the bits that symbols leave, and how many."""
    _symbols(foretold, found, which, told)
    once, twice = np.zeros(counts.shape[0] << 8, np.uint32), np.zeros(counts.shape[0] << 8, np.uint32)
    at, word, held = U64(0), U64(0), U64(0)
    for i in range(U64(0), U64(told.size)):
        symbol = U64(told[i])
        if symbol & U64(255) == U64(FAR):
            step = I64(I16(U16(found[i] - foretold[i])))
            size = abs(step)
            octave = _log2(size)
            many = U64(octave - 1)
            kind = NEAR + 2 * (octave - NEAR_BITS) + ((size >> (octave - 1)) & 1)
            symbol = (symbol ^ U64(FAR)) | U64(2 * kind - (1 if step > 0 else 0))
            told[i] = U16(symbol)
            word |= U64(U64(size) & ((U64(1) << many) - U64(1))) << held
            held += many
            store64(bits, I64(at), word)
            at += held >> U64(3)
            word >>= held & U64(56)
            held &= U64(7)
        if i & U64(1):
            once[symbol] += U32(1)
        else:
            twice[symbol] += U32(1)
    for c in range(counts.shape[0]):
        for symbol in range(counts.shape[1]):
            counts[c, symbol] = once[(c << 8) | symbol] + twice[(c << 8) | symbol]
    return I64(U64(8) * at + held)


@kernel(SIZE, WORDS16, COUNTS, OUT32, OUT16)
def write(told, weights, states, words):
    """Fill states and, from their end on, words: the place of the first. There is room for one a value, and one."""
    each = weights.shape[1]
    of = np.zeros(weights.shape[0] << 8, np.uint64)
    for c in range(weights.shape[0]):
        begin = U64(0)
        for symbol in range(each):
            weight = U64(weights[c, symbol])
            of[(c << 8) | symbol] = weight | (begin << U64(32))
            begin += weight
    held = np.full(LANES, LEAST_STATE, np.uint64)
    at = words.size - 1
    for i in range(told.size - 1, -1, -1):
        entry, state = of[told[i]], held[i & (LANES - 1)]
        weight = entry & U64(0xFFFFFFFF)
        words[at] = U16(state & U64(0xFFFF))
        full = U64(1) if state >= weight << U64(20) else U64(0)
        at -= I64(full)
        state >>= full << U64(4)
        times = U64(types.float64(state) / types.float64(weight))
        held[i & (LANES - 1)] = (times << U64(WEIGHT_BITS)) + (state - times * weight) + (entry >> U64(32))
    for lane in range(LANES):
        states[lane] = U32(held[lane])
    return at + 1


@part
def _slots(weights, table):
    """For each bucket and slot: the symbol, its weight less one << 8, the slot's place in it << 20."""
    for c in range(weights.shape[0]):
        at = c << WEIGHT_BITS
        for symbol in range(weights.shape[1]):
            weight = weights[c, symbol]
            for place in range(weight):
                table[at] = U32(symbol) | U32((weight - U32(1)) << U32(8)) | U32(U32(place) << U32(20))
                at += 1


@part
def _far(symbol, bits, at):
    """A step beyond the near ones, and the place after its bits; the step is 0 if there are none."""
    kind = (symbol + 1) >> 1
    octave = NEAR_BITS + ((kind - NEAR) >> 1)
    many = octave - 1
    if (at >> 3) + 8 > bits.size:
        return I64(0), at
    rest = (load64(bits, at >> 3) >> U64(at & 7)) & ((U64(1) << U64(many)) - U64(1))
    size = I64(((2 | (kind & 1)) << many) | I64(rest))
    return (size if symbol & 1 else -size), at + many


@part
def _next(c, state, table):
    """The symbol of a value, and the state without it."""
    entry = U64(table[(U64(c) << U64(WEIGHT_BITS)) | (state & SLOTS)])
    rest = state >> U64(WEIGHT_BITS)
    return U8(entry), ((entry >> U64(8)) & SLOTS) * rest + rest + (entry >> U64(20))


@part
def _symbols_again(which, table, states, words, symbols):
    """Fill symbols; False if states and words are not those of so many."""
    held, at, size, start = np.empty(LANES, np.uint64), U64(0), U64(symbols.size), U64(0)
    for lane in range(LANES):
        held[lane] = U64(states[lane])
    while start < size:
        stop = min(start + U64(LANES), size)
        if at + U64(LANES) <= U64(words.size):  # all of these have a word to take: none asks
            for lane in range(U64(0), stop - start):
                symbols[start + lane], state = _next(which[start + lane], held[lane], table)
                empty = U64(state < LEAST_STATE)
                held[lane] = (state << (empty << U64(4))) | (U64(words[at]) & (U64(0) - empty))
                at += empty
        else:
            for lane in range(U64(0), stop - start):
                symbols[start + lane], state = _next(which[start + lane], held[lane], table)
                if state < LEAST_STATE:
                    if at >= U64(words.size):
                        return False
                    state = (state << U64(16)) | U64(words[at])
                    at += U64(1)
                held[lane] = state
        start = stop
    for lane in range(LANES):
        if held[lane] != LEAST_STATE:
            return False
    return at == U64(words.size)


@part
def _near(foretold, symbols, out):
    for i in range(out.size):
        symbol = U16(symbols[i])
        half = U16(U16(symbol + U16(1)) >> U16(1))
        sign = U16(U16(symbol & U16(1)) - U16(1))
        out[i] = U16(foretold[i] + U16(U16(half ^ sign) - sign))


@kernel(SIZE, WORDS16, BYTES, COUNTS, WORDS32, WORDS16, BYTES, OUT32, OUT, OUT16)
def read(foretold, which, weights, states, words, bits, table, symbols, out):
    """Fill `out`; how many bits were taken, -1 if states, words or bits are not those of so many words.

    `bits` has 8 bytes at its end that are no part of it. `table` and `symbols` are room.
    """
    _slots(weights, table)
    if not _symbols_again(which, table, states, words, symbols):
        return -1
    _near(foretold, symbols, out)
    bit = I64(0)
    for i in range(U64(0), U64(out.size)):
        if symbols[i] >= U8(FIRST_FAR):
            step, bit = _far(I64(symbols[i]), bits, bit)
            if not step:
                return -1
            out[i] = U16(foretold[i] + U16(step))
    return bit
