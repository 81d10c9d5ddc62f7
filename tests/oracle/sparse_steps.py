"""The twin of `sparse_steps.c`: steps of 16-bit floats of which few are not zero."""

import numpy as np

from ckpt_codecs.base import Array
from oracle.contexts import exponent_buckets
from oracle.range_coder import MODELS_PER_BIT, Reader, Writer

SHIFT_BITS, STEP_BITS, MAX_SHIFT = 6, 16, 24
SHIFTS, SIGN = 0, MODELS_PER_BIT * SHIFT_BITS
FLAGS = SIGN + 1
MODELS_PER_BUCKET = 1 + MODELS_PER_BIT * STEP_BITS


def find_steps(
    predicted: Array, actual: Array, mantissa: int, least: int, contexts: int, many: int
) -> tuple[Array, Array, Array, Array, Array]:
    which = exponent_buckets(predicted, mantissa, least, contexts)
    changed = actual != predicted
    buckets, steps = which[changed], (actual - predicted)[changed]
    sizes, first_gaps = np.bincount(which, minlength=contexts), np.zeros(contexts, np.int64)
    gaps = np.zeros(buckets.size, np.int64)
    for c in range(contexts):
        places = np.flatnonzero(changed[which == c])
        between = np.diff(places, prepend=-1, append=sizes[c]) - 1
        first_gaps[c], gaps[buckets == c] = between[0], between[1:]
    return buckets, gaps, steps, sizes, first_gaps


def write_sparse_steps(
    buckets: Array, gaps: Array, steps: Array, sizes: Array, first_gaps: Array, shifts: Array, out: Array
) -> int:
    contexts = shifts.size
    rest, last = sizes.tolist(), 0
    writer = Writer(FLAGS + contexts * MODELS_PER_BUCKET)
    for c, shift in enumerate(shifts.tolist()):
        if rest[c]:
            more, last = shift - last, shift
            writer.number(SHIFTS, SHIFT_BITS, (2 * more if more >= 0 else -2 * more - 1) + 1)
            _write_gap(writer, c, shift, int(first_gaps[c]), rest[c])
            rest[c] -= int(first_gaps[c]) + 1
    for c, step, gap in zip(buckets.tolist(), steps.view(np.int16).tolist(), gaps.tolist(), strict=True):
        writer.bit(SIGN, step < 0)
        writer.number(FLAGS + c * MODELS_PER_BUCKET + 1, STEP_BITS, abs(step))
        _write_gap(writer, c, int(shifts[c]), gap, rest[c])
        rest[c] -= gap + 1
    data = writer.done()
    out[: len(data)] = np.frombuffer(data, np.uint8)[: out.size]
    return len(data)


def read_sparse_steps(data: Array, predicted: Array, mantissa: int, least: int, contexts: int, out: Array) -> bool:
    which = exponent_buckets(predicted, mantissa, least, contexts)
    sizes = np.bincount(which, minlength=contexts)
    reader = Reader(FLAGS + contexts * MODELS_PER_BUCKET, data.tobytes())
    shifts, left, rest, last = [0] * contexts, [0] * contexts, sizes.tolist(), 0
    for c in range(contexts):
        if rest[c]:
            more = reader.number(SHIFTS, SHIFT_BITS)
            last += more >> 1 if more & 1 else -(more >> 1)
            if not 0 <= last <= MAX_SHIFT:
                return False
            shifts[c], left[c] = last, _read_gap(reader, c, last, rest[c])
            rest[c] -= left[c] + 1
    out[:] = predicted
    for i, c in enumerate(which.tolist()):
        left[c] -= 1
        if left[c] < 0:
            if rest[c] < 0:
                return False
            down = reader.bit(SIGN)
            size = reader.number(FLAGS + c * MODELS_PER_BUCKET + 1, STEP_BITS)
            out[i] = int(predicted[i]) + (-size if down else size) & 0xFFFF
            left[c] = _read_gap(reader, c, shifts[c], rest[c])
            rest[c] -= left[c] + 1
    return reader.all_read


def _write_gap(writer: Writer, c: int, shift: int, gap: int, rest: int) -> None:
    passed = 0
    while passed < rest:
        ends = gap < rest and gap < passed + (1 << shift)
        writer.bit(FLAGS + c * MODELS_PER_BUCKET, ends)
        if ends:
            if shift:
                writer.even(gap - passed, shift)
            return
        passed += 1 << shift


def _read_gap(reader: Reader, c: int, shift: int, rest: int) -> int:
    gap = 0
    while gap < rest:
        if reader.bit(FLAGS + c * MODELS_PER_BUCKET):
            return gap + reader.even(shift)
        gap += 1 << shift
    return rest
