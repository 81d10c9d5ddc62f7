# mypy: ignore-errors
"""All streams of a chunk in one call, so that a thread asks for the GIL twice for each chunk and not twenty times."""

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
from ckpt_codecs.kernels.planes import below128, pack7, survey, unpack7
from ckpt_codecs.kinds import CONSTANT, ENTRY, HUFFMAN, SEPTETS, STORED
from ckpt_codecs.streams import FEW, LEAST_CODE, LEAST_SPARSE, SPARSE, WASTE

U8 = types.uint8


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
def _stream(plane, out, worth, look, counts, total, order, lengths, pairs):
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
            return FEW, held
        if held < most:
            return HUFFMAN, encode(plane, counts, lengths, pairs, out, 0)
    if size >= 8 and (septets or (bits == 0.0 and below128(plane))):
        held = size - size // 8
        pack7(plane, out[:held])
        return SEPTETS, held
    return STORED, size


@kernel(types.UniTuple(SIZE, 4), OUT, SIZES, REALS, TRUTHS, SIZE, SIZE, SIZE, OUT, COUNTS, OUT32, NUMBERS32, OUT, OUT32)
def write(out, sizes, worths, looks, i, place, at, spare, counts, total, order, lengths, pairs):
    """Streams from the i-th on, whose plane is at `place`, and their directory.

    How many are done, where the next plane is, where the last stream ends, what the next one would take.
    """
    while i < sizes.size:
        plane = out[place : place + sizes[i]]
        kind, held = _stream(plane, spare, worths[i], looks[i], counts, total, order, lengths, pairs)
        if kind == FEW:
            return i, place, at, held
        if kind != STORED:
            _move(spare[:held], out[at : at + held])
        elif place != at:
            _move(plane, out[at : at + held])
        entry = 1 + ENTRY * i
        out[entry] = U8(kind)
        for byte in range(4):
            out[entry + 1 + byte] = U8((held >> (8 * byte)) & 255)
        place, at, i = place + sizes[i], at + held, i + 1
    return i, place, at, 0


@kernel(SIZE, BYTES, BYTES, SIZES, SIZES, SIZES, OUT, OUT32, OUT64)
def read(source, kinds, starts, sizes, places, room, single, table):
    """Planes of streams `source[starts[i]:starts[i + 1]]` to their places; the number of the first that is damaged."""
    for i in range(sizes.size):
        start, end, size, kind = starts[i], starts[i + 1], sizes[i], kinds[i]
        if kind == STORED or kind > HUFFMAN:
            continue
        plane = room[places[i] : places[i] + size]
        if kind == CONSTANT and end - start == 1:
            plane[:] = source[start]
        elif kind == SEPTETS and end - start == size - size // 8:
            unpack7(source[start:end], plane)
        elif kind != HUFFMAN or not decode(source, start, end, single, table, plane):
            return i
    return sizes.size
