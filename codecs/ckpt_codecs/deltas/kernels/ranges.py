# mypy: ignore-errors
"""An adaptive binary arithmetic coder, and numbers of any size by it; docs/delta-codecs.md has the arithmetic.

The interval has 64 bits, of which at least 33 are in use, so that a bit is one multiplication and no division. A
writer is the low end of the interval, its size, and the place in the bytes; a reader has what it read less the low end.
"""

import numba
import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import part

inlined = numba.njit(inline="always")
"""As `part`, for what is so short that to be called costs more. LLVM alone does not see it."""

I64, U64 = types.int64, types.uint64
CHANCE_BITS = 22
HALF = 1 << (CHANCE_BITS - 1)
LEAST, MOST = np.uint64(1 << 8), np.uint64((1 << CHANCE_BITS) - (1 << 8))
CERTAIN = np.uint64(1 << CHANCE_BITS)
RATE_BITS = 20
SLOWEST = 4095
RATES = np.array([(2 << RATE_BITS) // (2 * seen + 3) for seen in range(SLOWEST + 1)], np.uint64)
TOLD = 2
"""Bits below the highest of a number that have models."""
MODELS_OF_A_BIT = 5
"""Models of a number for each bit that it may have."""
ONES = np.uint64(0xFFFFFFFF)
WHOLE = np.uint64(0xFFFFFFFFFFFFFFFF)


@part
def fresh(many):
    """Models that have learned nothing: the chance of a bit to be set, and how many bits were seen."""
    models = np.empty((many, 2), np.uint64)
    for i in range(many):
        models[i, 0], models[i, 1] = U64(HALF), U64(0)
    return models


@inlined
def _learn(models, model, bit):
    chance, seen = models[model, 0], models[model, 1]
    rate = RATES[seen]
    if bit:
        chance = min(chance + (((CERTAIN - chance) * rate) >> U64(RATE_BITS)), MOST)
    else:
        chance = max(chance - ((chance * rate) >> U64(RATE_BITS)), LEAST)
    models[model, 0] = chance
    models[model, 1] = seen + U64(seen < U64(SLOWEST))


# --- writing: bytes past the end of `out` are counted, not written


@part
def new_writer():
    return U64(0), WHOLE, U64(0)


@part
def _carry(at, out):
    while at > U64(0):
        at -= U64(1)
        if at < U64(out.size):
            out[at] += types.uint8(1)
            if out[at]:
                return


@inlined
def _raised(writer, by, size, out):
    """The interval of this size that begins so much higher, and is never smaller than 32 bits can tell."""
    low, at = writer[0] + by, writer[2]
    if low < by:
        _carry(at, out)
    if size <= ONES:
        for _ in range(4):
            if at < U64(out.size):
                out[at] = low >> U64(56)
            at += U64(1)
            low <<= U64(8)
        size <<= U64(32)
    return low, size, at


@inlined
def put_bit(writer, models, model, bit, out):
    bound = (writer[1] >> U64(CHANCE_BITS)) * models[model, 0]
    made = _raised(writer, U64(0) if bit else bound, bound if bit else writer[1] - bound, out)
    _learn(models, model, bit)
    return made


@inlined
def put_even(writer, number, many, out):
    """Up to 24 bits that nothing tells of."""
    size = writer[1] >> U64(many)
    return _raised(writer, size * U64(number), size, out)


@part
def put_number(writer, models, base, most, number, out):
    """A number of 1 and more, of at most so many bits: how many, the highest ones by models, the rest evenly."""
    size = I64(0)
    while number >> size:
        size += 1
    for i in range(1, size):
        writer = put_bit(writer, models, base + i - 1, True, out)
    if size < most:
        writer = put_bit(writer, models, base + size - 1, False, out)
    left, prefix = size - 1, I64(1)
    while left > 0 and size - 1 - left < TOLD:
        left -= 1
        bit = (number >> left) & 1
        writer = put_bit(writer, models, base + most + 4 * (size - 1) + prefix, bit == 1, out)
        prefix = 2 * prefix + bit
    if left > 0:
        writer = put_even(writer, number & ((I64(1) << left) - 1), left, out)
    return writer


@part
def written(writer, out):
    """Finish with as few bytes as tell the interval from its neighbours. How many bytes there are."""
    low, at = writer[0], writer[2]
    last = low + (writer[1] - U64(1))
    if last < low:
        _carry(at, out)
        return I64(at)
    drop = U64(56)
    while drop and (last >> drop) << drop < low:
        drop -= U64(8)
    last = (last >> drop) << drop
    while last:
        if at < U64(out.size):
            out[at] = last >> U64(56)
        last <<= U64(8)
        at += U64(1)
    return I64(at)


# --- reading: zeros past the end of `data`


@part
def _four(found, at, data):
    for i in range(U64(4)):
        found = (found << U64(8)) | (U64(data[at + i]) if at + i < U64(data.size) else U64(0))
    return found


@part
def new_reader(data):
    return _four(_four(U64(0), U64(0), data), U64(4), data), WHOLE, U64(8)


@inlined
def _stretched(reader, data):
    found, size, at = reader
    if size <= ONES:
        return _four(found, at, data), size << U64(32), at + U64(4)
    return reader


@inlined
def get_bit(reader, models, model, data):
    """The bit, and the reader after it."""
    bound = (reader[1] >> U64(CHANCE_BITS)) * models[model, 0]
    bit = reader[0] < bound
    _learn(models, model, bit)
    if bit:
        return True, _stretched((reader[0], bound, reader[2]), data)
    return False, _stretched((reader[0] - bound, reader[1] - bound, reader[2]), data)


@inlined
def get_even(reader, many, data):
    size = reader[1] >> U64(many)
    number = min(reader[0] // size, (U64(1) << U64(many)) - U64(1))
    return I64(number), _stretched((reader[0] - number * size, size, reader[2]), data)


@part
def get_number(reader, models, base, most, data):
    size = I64(1)
    while size < most:
        more, reader = get_bit(reader, models, base + size - 1, data)
        if not more:
            break
        size += 1
    number, left, prefix = I64(1), size - 1, I64(1)
    while left > 0 and size - 1 - left < TOLD:
        left -= 1
        bit, reader = get_bit(reader, models, base + most + 4 * (size - 1) + prefix, data)
        number = 2 * number + bit
        prefix = 2 * prefix + bit
    if left > 0:
        rest, reader = get_even(reader, left, data)
        number = (number << left) | rest
    return number, reader


@part
def all_read(reader, data):
    return reader[2] >= U64(data.size)
