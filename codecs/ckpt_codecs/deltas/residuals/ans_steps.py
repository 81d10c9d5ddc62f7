"""Residuals of halves of which many change: how far each goes, by a table of weights for each bucket."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.deltas.format_ids import MOST_BUCKETS, TABLES
from ckpt_codecs.deltas.residuals.exponent_buckets import ExponentBuckets, bucket_of
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas
from ckpt_codecs.scratch import thread_buffer

HEAD = Struct("<BBBII")
"""The form, the least exponent, how many buckets, how many bytes of tables, how many words."""
SYMBOLS, LANES = 108, 16
WHOLE = 1 << 12
"""The sum of the weights in a table."""
FINE = 8
WEIGHTS = np.array([*range(FINE), *((FINE + i) << octave for octave in range(9) for i in range(FINE))])
"""By the number that stands in files: all below 16, then eight to an octave."""
MIDDLES = (WEIGHTS[1:] + WEIGHTS[:-1]) / 2


def encode_ans_steps(foretold: Array, found: Array, span: ExponentBuckets) -> bytes | None:
    """A part with a symbol for each value; None if it would be larger than the values."""
    which = bucket_of(foretold, span)
    told, counts, bits = deltas.count_step_symbols(foretold, found, which, span.many)
    rows = _rows(counts)
    states, words = deltas.write_ans_steps(told, _weights(rows))
    room = thread_buffer("tables", 2 * rows.size)
    table = room[: deltas.write_rows(rows.reshape(-1), 1 + SYMBOLS, room)]
    head = HEAD.pack(TABLES, span.least, span.many, table.size, words.size)
    made = b"".join([head, table.data, states.data, words.data, bits.data])
    return made if len(made) < found.nbytes else None


def decode_ans_steps(data: Bytes, foretold: Array, mantissa: int) -> Array:
    if len(data) < HEAD.size:
        raise CodecError("a part of tables ends in its head")
    _, least, many, tabled, worded = HEAD.unpack_from(data)
    begin = HEAD.size + tabled
    middle = begin + 4 * LANES
    end = middle + 2 * worded
    if not 1 <= many <= MOST_BUCKETS or end + deltas.PADDING > len(data):
        raise CodecError("the head of a part of tables is damaged")
    held = np.frombuffer(data, np.uint8)
    rows = np.empty((many, 1 + SYMBOLS), np.uint8)
    if not deltas.read_rows(held[HEAD.size : begin], 1 + SYMBOLS, rows.reshape(-1)):
        raise CodecError("a table is damaged")
    which, out = bucket_of(foretold, ExponentBuckets(mantissa, least, many)), np.empty_like(foretold)
    states, words = held[begin:middle].copy().view(np.uint32), held[middle:end].copy().view(np.uint16)
    if not deltas.read_ans_steps(foretold, which, _weights(rows), states, words, held[end:], out):
        raise CodecError("a part of tables is damaged")
    return out


def _rows(counts: Array) -> Array:
    """Of each bucket the symbol that takes what is left, and the weights of the others by their numbers."""
    rows = np.zeros((len(counts), 1 + SYMBOLS), np.uint8)
    first, each = counts.argmax(axis=1), np.arange(len(counts))
    share = counts * (WHOLE / np.maximum(counts.sum(axis=1, dtype=np.int64), 1))[:, None]
    numbers = np.where(counts > 0, np.maximum(np.searchsorted(MIDDLES, share, side="right"), 1), 0)
    numbers[each, first] = 0
    while (full := WEIGHTS[numbers].sum(axis=1) >= WHOLE).any():
        numbers[full, numbers[full].argmax(axis=1)] -= 1
    rows[:, 0], rows[:, 1:] = first, numbers
    return rows


def _weights(rows: Array) -> Array:
    """Of each bucket and symbol; they add up to `WHOLE`."""
    first, numbers, each = rows[:, 0], rows[:, 1:], np.arange(len(rows))
    if (first >= SYMBOLS).any() or (numbers >= WEIGHTS.size).any() or numbers[each, first].any():
        raise CodecError("a table has symbols or weights that there are not")
    weights = WEIGHTS[numbers]
    left = WHOLE - weights.sum(axis=1)
    if (left < 1).any():
        raise CodecError("the weights of a table are too large")
    weights[each, first] = left
    made: Array = weights.astype(np.uint32)
    return made
