# mypy: ignore-errors
"""Halves of which few change: where, and by how much; docs/delta-codecs.md has the order of all that is told."""

import numpy as np
from numba import types

from ckpt_codecs.deltas.kernels.ranges import (
    MODELS_OF_A_BIT,
    all_read,
    fresh,
    get_bit,
    get_even,
    get_number,
    new_reader,
    new_writer,
    put_bit,
    put_even,
    put_number,
    written,
)
from ckpt_codecs.kernels.jit import BYTES, OUT, OUT16, SIZE, WORDS16, kernel, part

I16, I64, U8, U16, U32, U64 = types.int16, types.int64, types.uint8, types.uint16, types.uint32, types.uint64
SIZES = types.Array(types.int64, 1, "C", readonly=True)
OUT_SIZES = types.Array(types.int64, 1, "C")
KIND_BITS, STEP_BITS = 6, 16
MODELS_OF_A_KIND, MODELS_OF_A_STEP = MODELS_OF_A_BIT * KIND_BITS, MODELS_OF_A_BIT * STEP_BITS
KINDS, SIGN = 0, MODELS_OF_A_KIND
FLAGS = SIGN + 1
"""From here on, the models of each bucket: of its flag, and of how far its values go."""
MODELS_OF_A_BUCKET = 1 + MODELS_OF_A_STEP
MOST_SHIFT = 24


@kernel(SIZE, WORDS16, WORDS16, BYTES, OUT, OUT_SIZES, OUT16, OUT_SIZES, OUT_SIZES)
def find(foretold, found, which, buckets, gaps, steps, sizes, tails):
    """Of each change its bucket, how many values of this stood before it unchanged, and the step; how many there are.

    Then of each bucket how many values it has, and how many after its last change.
    """
    many = U64(0)
    sizes[:] = 0
    tails[:] = 0
    for i in range(U64(0), U64(found.size)):
        c, step = which[i], U16(found[i] - foretold[i])
        tails[c] += 1
        if step:
            buckets[many], gaps[many], steps[many] = c, tails[c] - 1, step
            many += U64(1)
            sizes[c] += tails[c]
            tails[c] = 0
    for c in range(sizes.size):
        sizes[c] += tails[c]
    return I64(many)


@part
def _put_gap(writer, models, c, shift, gap, rest, out):
    """How many of the `rest` of a bucket's values come before its next change: all, if there is none.

    Whether there are so many more, time and again; how many above that, evenly.
    """
    model, whole = FLAGS + c * MODELS_OF_A_BUCKET, I64(0)
    while whole < rest:
        found = gap < rest and gap < whole + (I64(1) << shift)
        writer = put_bit(writer, models, model, found, out)
        if found:
            return put_even(writer, gap - whole, shift, out) if shift else writer
        whole += I64(1) << shift
    return writer


@part
def _get_gap(reader, models, c, shift, rest, data):
    """It may be more than the rest if the bytes are damaged."""
    model, gap = FLAGS + c * MODELS_OF_A_BUCKET, I64(0)
    while gap < rest:
        found, reader = get_bit(reader, models, model, data)
        if found:
            more, reader = get_even(reader, shift, data)
            return gap + more, reader
        gap += I64(1) << shift
    return rest, reader


@kernel(SIZE, BYTES, SIZES, WORDS16, SIZES, SIZES, BYTES, OUT_SIZES, OUT)
def write(buckets, gaps, steps, sizes, tails, kinds, following, out):
    """Code changes; how many bytes that takes, though there may be more than `out` has."""
    many, contexts = buckets.size, kinds.size
    after, rest = tails.copy(), sizes.copy()
    for i in range(many - 1, -1, -1):
        c = buckets[i]
        following[i], after[c] = after[c], gaps[i]
    models, writer = fresh(FLAGS + contexts * MODELS_OF_A_BUCKET), new_writer()
    last = I64(0)
    for c in range(contexts):
        if sizes[c]:
            way = I64(kinds[c]) - last
            last = I64(kinds[c])
            writer = put_number(writer, models, KINDS, KIND_BITS, (2 * way if way >= 0 else -2 * way - 1) + 1, out)
            writer = _put_gap(writer, models, c, last, after[c], rest[c], out)
            rest[c] -= after[c] + 1
    for i in range(many):
        c, step = I64(buckets[i]), I64(I16(steps[i]))
        writer = put_bit(writer, models, SIGN, step < 0, out)
        writer = put_number(writer, models, FLAGS + c * MODELS_OF_A_BUCKET + 1, STEP_BITS, abs(step), out)
        writer = _put_gap(writer, models, c, I64(kinds[c]), following[i], rest[c], out)
        rest[c] -= following[i] + 1
    return written(writer, out)


@kernel(types.boolean, BYTES, WORDS16, BYTES, SIZES, OUT16)
def read(data, foretold, which, sizes, out):
    """Fill `out`; False if these are no bytes of so many words."""
    contexts = sizes.size
    models, reader = fresh(FLAGS + contexts * MODELS_OF_A_BUCKET), new_reader(data)
    kinds, left, rest = np.zeros(contexts, np.int64), np.zeros(contexts, np.int64), sizes.copy()
    last = I64(0)
    for c in range(contexts):
        if rest[c]:
            way, reader = get_number(reader, models, KINDS, KIND_BITS, data)
            last += way >> 1 if way & 1 else -(way >> 1)
            if not 0 <= last <= MOST_SHIFT:
                return False
            kinds[c] = last
            left[c], reader = _get_gap(reader, models, c, last, rest[c], data)
            rest[c] -= left[c] + 1
    for i in range(U64(0), U64(out.size)):
        c = which[i]
        left[c] -= 1
        out[i] = foretold[i]
        if left[c] < 0:
            if rest[c] < 0:
                return False
            back, reader = get_bit(reader, models, SIGN, data)
            step, reader = get_number(reader, models, FLAGS + I64(c) * MODELS_OF_A_BUCKET + 1, STEP_BITS, data)
            out[i] = U16(foretold[i] + U16(-step if back else step))
            left[c], reader = _get_gap(reader, models, I64(c), kinds[c], rest[c], data)
            rest[c] -= left[c] + 1
    return all_read(reader, data)
