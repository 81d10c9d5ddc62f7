# mypy: ignore-errors
"""Planes made streams, and streams planes again: all of a chunk in one call."""

import numpy as np
from numba import types

from ckpt_codecs.kernels.codes import assign, cost, count
from ckpt_codecs.kernels.decode import decode
from ckpt_codecs.kernels.encode import encode
from ckpt_codecs.kernels.jit import (
    BYTES,
    COUNTS,
    NUMBERS32,
    OUT,
    OUT32,
    OUT64,
    REALS,
    SIZE,
    SIZES,
    TRUTHS,
    kernel,
    part,
)
from ckpt_codecs.kernels.memory import load32
from ckpt_codecs.kernels.planes import below128, pack2, pack7, survey, unpack2, unpack7
from ckpt_codecs.kinds import CONSTANT, DIGITS, ENTRY, HUFFMAN, SEPTETS, STORED
from ckpt_codecs.streams import FEW, LEAST_CODE, LEAST_SPARSE, MOSTLY, READ, SPARSE, WASTE

U8 = types.uint8
LEAST_DIGITS, MOST_DIGITS = 4, 16
"""Symbols of a plane of which two go into a byte."""


@part
def _entropy(counts):
    """Bits of a whole plane."""
    bits, size = 0.0, 0
    for symbol in range(256):
        n = 0
        for s in range(counts.shape[0]):
            n += types.intp(counts[s, symbol])
        if n:
            bits -= n * np.log2(n)
            size += n
    return bits + size * np.log2(size)


@part
def _move(plane, out):
    """Upwards, so that a plane may be moved down. Assigning to a slice would be ten times as slow."""
    for i in range(plane.size):
        out[i] = plane[i]


@part
def _nested(plane, out, at, counts, total, order, lengths, pairs):
    """Append a stream within a stream: its kind, its size, itself. Where it ends."""
    count(plane, counts)
    used = assign(counts, total, order, lengths)
    held = 1 if used == 1 else cost(counts, lengths)
    kind = STORED if held >= plane.size else CONSTANT if used == 1 else HUFFMAN
    held = plane.size if kind == STORED else held
    at = _head(out, at, kind, held)
    if kind == CONSTANT:
        out[at] = plane[0]
    elif kind == HUFFMAN:
        encode(plane, counts, lengths, pairs, out, at)
    else:
        _move(plane, out[at : at + held])
    return at + held


@part
def _head(out, at, kind, held):
    out[at] = U8(kind)
    for byte in range(4):
        out[at + 1 + byte] = U8((held >> (8 * byte)) & 255)
    return at + ENTRY


@part
def _digits(plane, out, packed, counts, total, order, lengths, pairs):
    """Write the plane that was counted last as digits, two to a byte: how many bytes; 0 where `sparse` is to be asked.

    If it has too many symbols for that nothing is written, and it is as long as it was.
    """
    base, most, size = 0, 0, plane.size
    symbols = np.empty(256, np.uint8)
    for symbol in range(256):
        n = 0
        for s in range(counts.shape[0]):
            n += types.intp(counts[s, symbol])
        if n:
            symbols[base] = symbol
            base += 1
            most = max(most, n)
    if base < LEAST_DIGITS or most >= MOSTLY * size:
        return 0
    if base > MOST_DIGITS:
        return size
    packed = packed[: (size + 1) // 2]
    pack2(plane, symbols[:base], pairs.view(np.uint8), packed)
    out[0] = U8(base)
    for i in range(base):
        out[1 + i] = symbols[i]
    return _nested(packed, out, 1 + base, counts, total, order, lengths, pairs)


@part
def _stream(plane, out, worth, look, packed, counts, total, order, lengths, pairs):
    """Write a plane as a stream, unless it is to be stored: its kind and size. `FEW`: what its code would take."""
    size = plane.size
    if not size:
        return STORED, 0
    bits = survey(plane) if look else 0.0
    septets = 5.0 < bits < 7.01 and below128(plane)
    most = types.intp((size - size // 8 if septets else size) * worth)
    if size * bits / 8 + LEAST_CODE < most:
        count(plane, counts)
        if assign(counts, total, order, lengths) == 1:
            out[0] = plane[0]
            return CONSTANT, 1
        held = cost(counts, lengths)
        if size >= LEAST_SPARSE and 8 * held < SPARSE * size and held > WASTE * _entropy(counts) / 8:
            digits = _digits(plane, out, packed, counts, total, order, lengths, pairs)
            if digits < held:
                return (DIGITS, digits) if digits else (FEW, held)
            count(plane, counts)
            assign(counts, total, order, lengths)
        if held < most:
            return HUFFMAN, encode(plane, counts, lengths, pairs, out, 0)
    if size >= 8 and (septets or (bits == 0.0 and below128(plane))):
        held = size - size // 8
        pack7(plane, out[:held])
        return SEPTETS, held
    return STORED, size


@part
def write_streams(out, sizes, worths, looks, i, place, at, spare, packed, counts, total, order, lengths, pairs):
    """Streams from the i-th on, whose plane is at `place`, and their directory.

    How many are done, where the next plane is, where the last stream ends, what the next one would take.
    """
    while i < sizes.size:
        plane = out[place : place + sizes[i]]
        kind, held = _stream(plane, spare, worths[i], looks[i], packed, counts, total, order, lengths, pairs)
        if kind == FEW:
            return i, place, at, held
        if kind != STORED:
            _move(spare[:held], out[at : at + held])
        elif place != at:
            _move(plane, out[at : at + held])
        _head(out, 1 + ENTRY * i, kind, held)
        place, at, i = place + sizes[i], at + held, i + 1
    return i, place, at, 0


TABLES = (OUT, OUT, COUNTS, OUT32, NUMBERS32, OUT, OUT32)
"""Memory to work in: two planes, and what a code is made with."""


@kernel(types.UniTuple(SIZE, 4), OUT, SIZES, REALS, TRUTHS, SIZE, SIZE, SIZE, *TABLES)
def write(out, sizes, worths, looks, i, place, at, spare, packed, counts, total, order, lengths, pairs):
    return write_streams(out, sizes, worths, looks, i, place, at, spare, packed, counts, total, order, lengths, pairs)


@part
def _inner(source, at, end, out, single, table):
    """Fill `out` from the stream within a stream that is `source[at:end]`."""
    if end - at < ENTRY or at + ENTRY + types.intp(load32(source, at + 1)) != end:
        return False
    kind, start = source[at], at + ENTRY
    if kind == STORED and end - start == out.size:
        _move(source[start:end], out)
        return True
    if kind == CONSTANT and end - start == 1:
        out[:] = source[start]
        return True
    return kind == HUFFMAN and decode(source, start, end, single, table, out)


@part
def _from_digits(source, start, end, plane, packed, single, table):
    base = types.intp(source[start]) if start < end else 0
    if not LEAST_DIGITS <= base <= MOST_DIGITS or end - start < 1 + base:
        return False
    packed = packed[: (plane.size + 1) // 2]
    if not _inner(source, start + 1 + base, end, packed, single, table):
        return False
    unpack2(packed, source[start + 1 : start + 1 + base], plane)
    return True


@part
def read_stream(kind, source, start, end, plane, packed, single, table):
    """Fill a plane from the stream `source[start:end]`: False if it is damaged, or of a kind that kernels leave."""
    if kind == CONSTANT and end - start == 1:
        plane[:] = source[start]
        return True
    if kind == SEPTETS and end - start == plane.size - plane.size // 8:
        unpack7(source[start:end], plane)
        return True
    if kind == DIGITS:
        return _from_digits(source, start, end, plane, packed, single, table)
    return kind == HUFFMAN and decode(source, start, end, single, table, plane)


@kernel(SIZE, BYTES, OUT, SIZES, SIZES, SIZES, OUT, OUT, OUT32, OUT64)
def read(source, kinds, starts, sizes, places, room, packed, single, table):
    """Planes of streams `source[starts[i]:starts[i + 1]]` to their places; the number of the first that is damaged.

    Where that is done, the kind becomes `READ`.
    """
    for i in range(sizes.size):
        plane = room[places[i] : places[i] + sizes[i]]
        if read_stream(kinds[i], source, starts[i], starts[i + 1], plane, packed, single, table):
            kinds[i] = READ
        elif kinds[i] == CONSTANT or kinds[i] == SEPTETS or kinds[i] == HUFFMAN:
            return i
    return sizes.size
