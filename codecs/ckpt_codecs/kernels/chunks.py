# mypy: ignore-errors
"""Whole chunks in one call, so that a thread asks for the GIL twice for each chunk and not twenty times.

Reading, a kernel may leave a chunk to the way that takes many calls, which reads all kinds of streams and says what is
wrong with damaged ones.
"""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import (
    BYTES,
    NUMBERS32,
    OUT,
    OUT16,
    OUT32,
    OUT64,
    SIZE,
    WORDS16,
    WORDS32,
    kernel,
    part,
)
from ckpt_codecs.kernels.memory import load32
from ckpt_codecs.kernels.planes import merge16, merge32, split16, split32, survey
from ckpt_codecs.kernels.scales import (
    from_residuals_alone,
    from_residuals_based,
    to_residuals_alone,
    to_residuals_based,
)
from ckpt_codecs.kernels.streams import TABLES, read_stream, write_streams
from ckpt_codecs.kinds import ENTRY, STORED

PROGRESS = types.UniTuple(SIZE, 4)
REAL, TRUTH = types.float64, types.boolean


@part
def _efforts(count, size, worth, look):
    """Of planes that are all as large, the last one surely worth it: sizes, worths, looks."""
    sizes, worths, looks = np.empty(count, np.int64), np.empty(count, np.float64), np.empty(count, np.bool_)
    for i in range(count):
        sizes[i], worths[i], looks[i] = size, worth, look
    looks[count - 1] = False
    return sizes, worths, looks


@kernel(PROGRESS, WORDS16, OUT, REAL, TRUTH, *TABLES)
def write_planes16(words, out, worth, look, spare, packed, counts, total, order, lengths, pairs):
    n, at = words.size, 1 + 2 * ENTRY
    split16(words, out[at : at + n], out[at + n : at + 2 * n])
    sizes, worths, looks = _efforts(2, n, worth, look)
    return write_streams(out, sizes, worths, looks, 0, at, at, spare, packed, counts, total, order, lengths, pairs)


@kernel(PROGRESS, WORDS32, OUT, REAL, TRUTH, *TABLES)
def write_planes32(words, out, worth, look, spare, packed, counts, total, order, lengths, pairs):
    n, at = words.size, 1 + 4 * ENTRY
    low, middle = out[at : at + n], out[at + n : at + 2 * n]
    split32(words, low, middle, out[at + 2 * n : at + 3 * n], out[at + 3 * n : at + 4 * n])
    sizes, worths, looks = _efforts(4, n, worth, look)
    return write_streams(out, sizes, worths, looks, 0, at, at, spare, packed, counts, total, order, lengths, pairs)


@kernel(PROGRESS, WORDS32, WORDS32, TRUTH, SIZE, NUMBERS32, SIZE, OUT, REAL, TRUTH, REAL, OUT, *TABLES)
def write_residuals(
    words, base, based, columns, column, width, out, worth, look, of_rows,
    room, spare, packed, counts, total, order, lengths, pairs,
):  # fmt: skip
    """Of values of `width` bytes; `of_rows`: what streams of scales are worth. -1 if nothing is gained."""
    n, planes = words.size, width - 1
    rows = np.empty(n // columns, np.int16)
    begin = at = 1 + ENTRY * (width + 3)
    top, low, middle = room[:n], room[n : 2 * n], room[2 * n : 3 * n]
    if width == 4:
        low, middle = out[at : at + n], out[at + n : at + 2 * n]
        at += 2 * n
    high, at = out[at : at + n], at + n
    scales = out[at : at + 2 + 2 * rows.size]
    at += scales.size
    residuals = out[at : at + n]
    if based:
        to_residuals_based(words, base, columns, column, rows, low, middle, high, top, residuals)
    else:
        to_residuals_alone(words, columns, column, rows, low, middle, high, top, residuals)
    if survey(top) * n <= survey(residuals) * n + 8 * rows.size:
        return -1, 0, 0, 0
    least = rows.min()
    scales[0], scales[1] = types.uint8(least & 255), types.uint8((least >> 8) & 255)
    for row in range(rows.size):
        above = types.int64(rows[row]) - types.int64(least)
        scales[2 + row], scales[2 + rows.size + row] = types.uint8(above & 255), types.uint8((above >> 8) & 255)
    sizes, worths, looks = _efforts(width + 3, n, worth, look)
    for i in range(planes, planes + 3):
        sizes[i], worths[i], looks[i] = (2 if i == planes else rows.size), of_rows, True
    return write_streams(
        out, sizes, worths, looks, 0, begin, begin, spare, packed, counts, total, order, lengths, pairs
    )


@part
def _directory(source, count, starts):
    """Where each stream begins, and the last one ends; False if that is not where the chunk ends."""
    starts[0] = 1 + ENTRY * count
    if source.size < starts[0]:
        return False
    for i in range(count):
        starts[i + 1] = starts[i] + types.int64(load32(source, 2 + ENTRY * i))
    return starts[count] == source.size


@part
def _plane(source, i, starts, room, seen, packed, single, table):
    """The i-th plane, where it lies or else in `room`, which is `seen` to read; of another size if it is damaged."""
    kind, start, end = source[1 + ENTRY * i], starts[i], starts[i + 1]
    if kind == STORED:
        return source[start:end]
    return seen if read_stream(kind, source, start, end, room, packed, single, table) else source[:0]


@kernel(TRUTH, BYTES, OUT16, OUT, BYTES, OUT, OUT32, OUT64)
def read_planes16(source, words, room, seen, packed, single, table):
    n, starts = words.size, np.empty(3, np.int64)
    if not n or not _directory(source, 2, starts):
        return False
    low = _plane(source, 0, starts, room[:n], seen[:n], packed, single, table)
    top = _plane(source, 1, starts, room[n : 2 * n], seen[n : 2 * n], packed, single, table)
    if low.size != n or top.size != n:
        return False
    merge16(low, top, words)
    return True


@kernel(TRUTH, BYTES, OUT32, OUT, BYTES, OUT, OUT32, OUT64)
def read_planes32(source, words, room, seen, packed, single, table):
    n, starts = words.size, np.empty(5, np.int64)
    if not n or not _directory(source, 4, starts):
        return False
    low = _plane(source, 0, starts, room[:n], seen[:n], packed, single, table)
    middle = _plane(source, 1, starts, room[n : 2 * n], seen[n : 2 * n], packed, single, table)
    high = _plane(source, 2, starts, room[2 * n : 3 * n], seen[2 * n : 3 * n], packed, single, table)
    top = _plane(source, 3, starts, room[3 * n : 4 * n], seen[3 * n : 4 * n], packed, single, table)
    if low.size != n or middle.size != n or high.size != n or top.size != n:
        return False
    merge32(low, middle, high, top, words)
    return True


@kernel(TRUTH, BYTES, WORDS32, TRUTH, SIZE, NUMBERS32, OUT32, OUT, BYTES, OUT, OUT32, OUT64)
def read_residuals(source, base, based, columns, column, words, room, seen, packed, single, table):
    n, starts = words.size, np.empty(8, np.int64)
    if not n or not _directory(source, 7, starts):
        return False
    many = n // columns
    low = _plane(source, 0, starts, room[:n], seen[:n], packed, single, table)
    middle = _plane(source, 1, starts, room[n : 2 * n], seen[n : 2 * n], packed, single, table)
    high = _plane(source, 2, starts, room[2 * n : 3 * n], seen[2 * n : 3 * n], packed, single, table)
    at = 3 * n
    residuals = _plane(source, 6, starts, room[at : at + n], seen[at : at + n], packed, single, table)
    at += n
    least = _plane(source, 3, starts, room[at : at + 2], seen[at : at + 2], packed, single, table)
    at += 2
    lower = _plane(source, 4, starts, room[at : at + many], seen[at : at + many], packed, single, table)
    at += many
    upper = _plane(source, 5, starts, room[at : at + many], seen[at : at + many], packed, single, table)
    if low.size != n or middle.size != n or high.size != n or residuals.size != n:
        return False
    if least.size != 2 or lower.size != many or upper.size != many:
        return False
    rows = np.empty(many, np.int16)
    for row in range(many):
        scale = types.int64(least[0]) + 256 * types.int64(least[1])
        scale += types.int64(lower[row]) + 256 * types.int64(upper[row])
        rows[row] = types.int16(scale & 0xFFFF)
    if based:
        from_residuals_based(residuals, low, middle, high, base, columns, column, rows, words)
    else:
        from_residuals_alone(residuals, low, middle, high, columns, column, rows, words)
    return True
