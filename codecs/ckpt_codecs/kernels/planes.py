# mypy: ignore-errors
"""Words to byte planes and back. The exponent's plane is apart; the sign goes on top of the mantissa."""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, OUT, OUT16, OUT32, SIZE, WORDS16, WORDS32, kernel, part

U8, U16, U32 = types.uint8, types.uint16, types.uint32


@kernel(types.void, WORDS16, OUT, OUT)
def split16(words, low, top):
    for i in range(words.size):
        word = words[i]
        top[i] = U8(word >> U16(7))
        low[i] = U8((word & U16(0x7F)) | ((word >> U16(8)) & U16(0x80)))


@kernel(types.void, BYTES, BYTES, OUT16)
def merge16(low, top, words):
    for i in range(words.size):
        rest = U16(low[i])
        words[i] = (U16(top[i]) << U16(7)) | (rest & U16(0x7F)) | ((rest & U16(0x80)) << U16(8))


@kernel(types.void, WORDS32, OUT, OUT, OUT, OUT)
def split32(words, low, middle, high, top):
    for i in range(words.size):
        word = words[i]
        top[i] = U8(word >> U32(23))
        high[i] = U8(((word >> U32(16)) & U32(0x7F)) | ((word >> U32(24)) & U32(0x80)))
        middle[i] = U8(word >> U32(8))
        low[i] = U8(word)


@kernel(types.void, BYTES, BYTES, BYTES, BYTES, OUT32)
def merge32(low, middle, high, top, words):
    for i in range(words.size):
        rest = U32(high[i])
        words[i] = (
            (U32(top[i]) << U32(23))
            | ((rest & U32(0x7F)) << U32(16))
            | ((rest & U32(0x80)) << U32(24))
            | (U32(middle[i]) << U32(8))
            | U32(low[i])
        )


@part
def _is_nan(word):
    return U32(word & U32(0x7FFFFFFF)) > U32(0x7F800000)


@part
def _rounded(word):
    """The nearest bfloat16, ties to even; a NaN keeps its sign alone."""
    odd = U32(U32(word >> U32(16)) & U32(1))
    nearest = U32(U32(U32(word + U32(0x7FFF)) + odd) >> U32(16))
    nan = U32(U32(U32(word >> U32(16)) & U32(0x8000)) | U32(0x7FC0))
    return nan if _is_nan(word) else nearest


@kernel(types.void, WORDS32, OUT16)
def to_bfloat16(words, out):
    for i in range(words.size):
        out[i] = U16(_rounded(words[i]))


@kernel(types.boolean, WORDS32, WORDS16)
def is_bfloat16_of(words, halves):
    """Are these the values rounded, and none of them a NaN?"""
    wrong = U32(0)
    for i in range(words.size):
        differs = U32(_rounded(words[i]) ^ U32(halves[i]))
        wrong = U32(wrong | (U32(1) if _is_nan(words[i]) else differs))
    return wrong == U32(0)


@kernel(types.void, BYTES, OUT)
def pack7(plane, out):
    """Eight runs of bytes below 128 to seven: the last run's bits become the top bits of the others."""
    n = plane.size // 8
    for j in range(7):
        for i in range(n):
            out[j * n + i] = plane[j * n + i] | (((plane[7 * n + i] >> U8(j)) & U8(1)) << U8(7))
    for i in range(plane.size - 8 * n):
        out[7 * n + i] = plane[8 * n + i]


@kernel(types.void, BYTES, OUT)
def unpack7(packed, plane):
    n = plane.size // 8
    for i in range(n):
        last = U8(0)
        for j in range(7):
            byte = packed[j * n + i]
            plane[j * n + i] = byte & U8(127)
            last |= (byte >> U8(7)) << U8(j)
        plane[7 * n + i] = last
    for i in range(plane.size - 8 * n):
        plane[8 * n + i] = packed[7 * n + i]


@kernel(types.void, BYTES, BYTES, OUT, OUT)
def pack2(plane, symbols, table, out):
    """Two symbols to a byte, as digits; `table` has room for every pair."""
    base = symbols.size
    for i in range(base):
        for j in range(base):
            table[types.intp(symbols[i]) | (types.intp(symbols[j]) << 8)] = U8(i + base * j)
    for i in range(plane.size // 2):
        out[i] = table[types.intp(plane[2 * i]) | (types.intp(plane[2 * i + 1]) << 8)]
    if plane.size & 1:
        out[plane.size // 2] = table[types.intp(plane[plane.size - 1]) | (types.intp(symbols[0]) << 8)]


@kernel(types.void, BYTES, BYTES, OUT)
def unpack2(packed, symbols, plane):
    base = symbols.size
    first, second = np.empty(256, np.uint8), np.empty(256, np.uint8)
    for byte in range(256):
        first[byte], second[byte] = symbols[byte % base], symbols[byte // base % base]
    for i in range(plane.size // 2):
        plane[2 * i], plane[2 * i + 1] = first[packed[i]], second[packed[i]]
    if plane.size & 1:
        plane[plane.size - 1] = first[packed[plane.size // 2]]


@kernel(SIZE, BYTES, types.uint8, OUT, OUT)
def gaps(plane, common, before, others):
    """How many common symbols stand before each other one, and the others; how many gaps there are."""
    many = found = run = 0
    for i in range(plane.size):
        if plane[i] == common:
            run += 1
        else:
            while run >= 255:
                before[many] = 255
                many += 1
                run -= 255
            before[many], others[found] = run, plane[i]
            many += 1
            found += 1
            run = 0
    return many


@kernel(types.boolean, BYTES, BYTES, types.uint8, OUT)
def from_gaps(before, others, common, plane):
    plane[:] = common
    place = found = 0
    for i in range(before.size):
        place += types.intp(before[i])
        if before[i] != U8(255):
            if place >= plane.size or found >= others.size:
                return False
            plane[place] = others[found]
            place += 1
            found += 1
    return found == others.size and (not before.size or before[before.size - 1] != U8(255))


@kernel(types.boolean, BYTES, short=True)
def below128(plane):
    every = U8(0)
    for i in range(plane.size):
        every = U8(every | plane[i])
    return every < U8(128)


HALF_BIT = 0.5 / np.log(2)
"""What a sample says too little of the entropy, for each symbol (Miller and Madow, 1955)."""
SAMPLES = 16
SAMPLE = 256


@kernel(types.float64, BYTES, short=True)
def survey(plane):
    """Bits a symbol, estimated from sixteen places."""
    table = np.zeros(512, np.uint32)
    each = plane.size // SAMPLES
    many = min(each, SAMPLE) // 2 * 2
    for s in range(SAMPLES):
        for i in range(s * each, s * each + many, 2):
            table[plane[i]] += U32(1)
            table[types.intp(plane[i + 1]) + 256] += U32(1)
    size = max(SAMPLES * many, 1)
    bits, used = 0.0, 0
    for symbol in range(256):
        n = table[symbol] + table[symbol + 256]
        if n:
            bits -= n * np.log2(n / size)
            used += 1
    return (bits + (used - 1) * HALF_BIT) / size
