# mypy: ignore-errors
"""Eight streams of Huffman codes, written; the format is in docs/codecs.md.

What a stream takes is known before it is written, so that all have their
places, and each store of 8 bytes stays inside its own.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.codes import BYTE, STREAMS, U64, canonical, share, span, stream_size
from ckpt_codecs.kernels.jit import BYTES, COUNTS, OUT, OUT32, SIZE, kernel, part
from ckpt_codecs.kernels.memory import load32, store64

TAIL = 64
"""Symbols left to the careful end of each stream: at one bit each, the 8 bytes that a store takes."""
LOW3 = np.uint64(7)
THREE = np.uint64(3)


@part
def _pairs(lengths, codes, pairs):
    """Two symbols, the first in the low byte, to their bits and how many these are, in the top byte."""
    used = np.empty(256, np.int64)
    n = 0
    for symbol in range(256):
        if lengths[symbol]:
            used[n] = symbol
            n += 1
    for i in range(n):
        b = used[i]
        for j in range(n):
            a = used[j]
            bits = codes[a] | (codes[b] << types.uint32(lengths[a]))
            pairs[a | (b << 8)] = bits | (types.uint32(lengths[a] + lengths[b]) << types.uint32(24))


@part
def _four(plane, i, pairs):
    """The bits of four symbols, and how many they are: at most 44."""
    four = load32(plane, i)
    low = pairs[four & types.uint32(0xFFFF)]
    high = pairs[four >> types.uint32(16)]
    many = U64(low >> types.uint32(24))
    code = U64(low & types.uint32(0xFFFFFF)) | (U64(high & types.uint32(0xFFFFFF)) << many)
    return code, many + U64(high >> types.uint32(24))


@part
def _flush(out, at, word, bits):
    store64(out, at, word)
    return at + types.intp(bits >> THREE), word >> (bits & ~LOW3), bits & LOW3


@part
def _put8(plane, i, pairs, out, at, word, bits):
    """Append eight symbols to a stream that has `bits < 8` bits in `word`."""
    code, many = _four(plane, i, pairs)
    word |= code << bits
    bits += many
    code, many = _four(plane, i + 4, pairs)
    if bits + many >= U64(64):
        at, word, bits = _flush(out, at, word, bits)
    word |= code << bits
    return _flush(out, at, word, bits + many)


@kernel(SIZE, BYTES, COUNTS, BYTES, OUT32, OUT, SIZE)
def encode(plane, counts, lengths, pairs, out, at):
    """Write the code and the streams from `at` on; `out` has room for `cost` bytes. Returns the end."""
    codes = np.zeros(256, np.uint32)
    canonical(lengths, codes)
    first, last = span(lengths)
    out[at], out[at + 1] = first, last
    at += 2
    for symbol in range(first, last + 1, 2):
        high = lengths[symbol + 1] if symbol < last else types.uint8(0)
        out[at] = lengths[symbol] | (high << types.uint8(4))
        at += 1
    ends = np.empty(STREAMS + 1, np.int64)
    ends[0] = at + 4 * STREAMS
    for s in range(STREAMS):
        size = stream_size(counts, lengths, s)
        ends[s + 1] = ends[s] + size
        for byte in range(4):
            out[at + byte] = (size >> (8 * byte)) & 255
        at += 4

    size = plane.size
    each = share(size)
    positions = ends[:STREAMS].copy()
    words = np.zeros(STREAMS, np.uint64)
    bits = np.zeros(STREAMS, np.uint64)
    rounds = 0
    if size > 8192 and (STREAMS - 1) * each < size:
        _pairs(lengths, codes, pairs)
        rounds = max(0, size - (STREAMS - 1) * each - TAIL) // 8
        for g in range(0, STREAMS, 4):
            p0, p1, p2, p3 = positions[g], positions[g + 1], positions[g + 2], positions[g + 3]
            w0 = w1 = w2 = w3 = U64(0)
            b0 = b1 = b2 = b3 = U64(0)
            i0, i1, i2, i3 = g * each, (g + 1) * each, (g + 2) * each, (g + 3) * each
            for _ in range(rounds):
                p0, w0, b0 = _put8(plane, i0, pairs, out, p0, w0, b0)
                p1, w1, b1 = _put8(plane, i1, pairs, out, p1, w1, b1)
                p2, w2, b2 = _put8(plane, i2, pairs, out, p2, w2, b2)
                p3, w3, b3 = _put8(plane, i3, pairs, out, p3, w3, b3)
                i0 += 8
                i1 += 8
                i2 += 8
                i3 += 8
            positions[g], positions[g + 1], positions[g + 2], positions[g + 3] = p0, p1, p2, p3
            words[g], words[g + 1], words[g + 2], words[g + 3] = w0, w1, w2, w3
            bits[g], bits[g + 1], bits[g + 2], bits[g + 3] = b0, b1, b2, b3
    for s in range(STREAMS):
        position, word, bit = positions[s], words[s], bits[s]
        for i in range(min(s * each, size) + 8 * rounds, min((s + 1) * each, size)):
            symbol = plane[i]
            word |= U64(codes[symbol]) << bit
            bit += U64(lengths[symbol])
            while bit >= U64(8):
                out[position] = word & BYTE
                position += 1
                word >>= U64(8)
                bit -= U64(8)
        if bit:
            out[position] = word & BYTE
    return ends[STREAMS]
