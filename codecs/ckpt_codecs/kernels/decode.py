# mypy: ignore-errors
"""Eight streams of Huffman codes, read; the format is in docs/codecs.md.

Memory safety does not rest on the bytes: the code is checked to be complete
before a table is made of it, and each loop without checks runs only as often
as the least room that is left allows, on the input and on the output.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.codes import BYTE, ENTRIES, LONGEST, STREAMS, U64, canonical, share
from ckpt_codecs.kernels.jit import BYTES, OUT, OUT32, OUT64, SIZE, kernel, part
from ckpt_codecs.kernels.memory import load32, load64, store64

AT_ONCE = 6
"""Symbols that one look-up gives at most: what fits beside two counters into 64 bits."""
LOOKUPS = 5
"""Look-ups after each load: 5 * 11 bits, and 7 to the next byte, fit into 64."""
BITS_A_ROUND = LOOKUPS * LONGEST
SYMBOLS_A_ROUND = LOOKUPS * AT_ONCE
MASK = np.uint64(ENTRIES - 1)
THREE = np.uint64(3)
USED, COUNT = np.uint64(48), np.uint64(56)


@part
def _read_code(source, at, end, lengths):
    """Lengths of the symbols, and where the streams' sizes begin; 0 if this is no complete code."""
    if end - at < 2:
        return 0
    first, last = types.intp(source[at]), types.intp(source[at + 1])
    at += 2
    if last <= first or end - at < (last - first + 2) // 2 + 4 * STREAMS:
        return 0
    lengths[:] = 0
    taken = 0
    for symbol in range(first, last + 1):
        nibble = source[at + (symbol - first) // 2]
        length = (nibble >> types.uint8(4)) if (symbol - first) & 1 else (nibble & types.uint8(15))
        if length > LONGEST:
            return 0
        lengths[symbol] = length
        if length:
            taken += ENTRIES >> types.intp(length)
    if taken != ENTRIES:
        return 0
    return at + (last - first + 2) // 2


@part
def _table(lengths, single, table):
    """For every 11 bits: the symbols that begin in them and end in them; bits used << 48; how many << 56."""
    codes = np.zeros(256, np.uint32)
    canonical(lengths, codes)
    for symbol in range(256):
        length = types.intp(lengths[symbol])
        if length:
            entry = types.uint32(symbol) | (types.uint32(length) << types.uint32(8))
            for at in range(types.intp(codes[symbol]), ENTRIES, 1 << length):
                single[at] = entry
    for at in range(ENTRIES):
        rest, symbols, used, n = types.uint32(at), U64(0), types.uint32(0), U64(0)
        for _ in range(AT_ONCE):
            entry = single[rest]
            length = entry >> types.uint32(8)
            fits = used + length <= types.uint32(LONGEST)
            if not fits:
                break
            symbols |= U64(entry & types.uint32(255)) << (n << THREE)
            n += U64(1)
            used += length
            rest >>= length
        table[at] = symbols | (U64(used) << USED) | (n << COUNT)


@part
def _take(table, word, bit, out, at):
    """One look-up: the word without the bits used, the bit reached, and the place reached in `out`."""
    entry = table[word & MASK]
    store64(out, at, entry)
    used = (entry >> USED) & BYTE
    return word >> used, bit + types.intp(used), at + types.intp(entry >> COUNT)


@part
def _word(source, bit):
    return load64(source, bit >> 3) >> U64(bit & 7)


@part
def _rounds(bit, last_bit, at, end):
    """How many rounds are safe: each loads 8 bytes of the stream, and stores inside its share of the output."""
    if bit > last_bit:
        return 0
    return min((last_bit - bit) // BITS_A_ROUND + 1, (end - at - 2) // SYMBOLS_A_ROUND)


@part
def _last_word(source, bit, end):
    """At least 11 bits from `bit` on, zeros past the end."""
    byte = bit >> 3
    word = U64(0)
    for i in range(min(3, end - byte)):
        word |= U64(source[byte + i]) << U64(8 * i)
    return word >> U64(bit & 7)


@kernel(types.boolean, BYTES, SIZE, SIZE, OUT32, OUT64, OUT)
def decode(source, at, end, single, table, out):
    """Fill `out` from the bytes `at:end`. False, with anything in `out`, if they are not what `encode` writes."""
    if not 0 <= at <= end <= source.size:
        return False
    lengths = np.empty(256, np.uint8)
    at = _read_code(source, at, end, lengths)
    if not at:
        return False
    size = out.size
    each = share(size)
    starts = np.empty(STREAMS + 1, np.int64)
    starts[0] = at + 4 * STREAMS
    for s in range(STREAMS):
        starts[s + 1] = starts[s] + types.int64(load32(source, at + 4 * s))
    if starts[STREAMS] != end:
        return False
    _table(lengths, single, table)

    bits = np.empty(STREAMS, np.int64)
    places = np.empty(STREAMS, np.int64)
    last_bits = np.empty(STREAMS, np.int64)
    stops = np.empty(STREAMS, np.int64)
    for s in range(STREAMS):
        bits[s] = 8 * starts[s]
        last_bits[s] = 8 * starts[s + 1] - 64
        places[s] = min(s * each, size)
        stops[s] = min((s + 1) * each, size)
    for g in range(0, STREAMS, 4):
        b0, b1, b2, b3 = bits[g], bits[g + 1], bits[g + 2], bits[g + 3]
        q0, q1, q2, q3 = places[g], places[g + 1], places[g + 2], places[g + 3]
        while True:
            rounds = min(
                min(_rounds(b0, last_bits[g], q0, stops[g]), _rounds(b1, last_bits[g + 1], q1, stops[g + 1])),
                min(_rounds(b2, last_bits[g + 2], q2, stops[g + 2]), _rounds(b3, last_bits[g + 3], q3, stops[g + 3])),
            )
            if rounds <= 0:
                break
            for _ in range(rounds):
                w0, w1, w2, w3 = _word(source, b0), _word(source, b1), _word(source, b2), _word(source, b3)
                for _ in range(LOOKUPS):
                    w0, b0, q0 = _take(table, w0, b0, out, q0)
                    w1, b1, q1 = _take(table, w1, b1, out, q1)
                    w2, b2, q2 = _take(table, w2, b2, out, q2)
                    w3, b3, q3 = _take(table, w3, b3, out, q3)
        bits[g], bits[g + 1], bits[g + 2], bits[g + 3] = b0, b1, b2, b3
        places[g], places[g + 1], places[g + 2], places[g + 3] = q0, q1, q2, q3
    for s in range(STREAMS):
        bit, place = bits[s], places[s]
        while True:  # where neighbours hold up one another no longer
            rounds = _rounds(bit, last_bits[s], place, stops[s])
            if rounds <= 0:
                break
            for _ in range(rounds):
                word = _word(source, bit)
                for _ in range(LOOKUPS):
                    word, bit, place = _take(table, word, bit, out, place)
        bits[s], places[s] = bit, place
    for s in range(STREAMS):
        bit, stop_bit = bits[s], 8 * starts[s + 1]
        for place in range(places[s], stops[s]):
            if bit >= stop_bit:
                return False
            entry = single[_last_word(source, bit, starts[s + 1]) & MASK]
            out[place] = entry & types.uint32(255)
            bit += types.int64(entry >> types.uint32(8))
        if (bit + 7) >> 3 != starts[s + 1]:
            return False
    return True
