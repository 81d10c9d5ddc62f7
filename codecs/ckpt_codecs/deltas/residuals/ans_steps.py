"""Residuals of 16-bit floats of which many change: a symbol for each step, coded by asymmetric numeral systems.

Each bucket has a table of the symbols' weights. Source: Duda, arXiv 1311.2540.
"""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.deltas.format_ids import ANS_STEPS, MAX_BUCKETS
from ckpt_codecs.deltas.residuals.exponent_buckets import ExponentBuckets, bucket_of
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas
from ckpt_codecs.scratch import thread_buffer

HEAD = Struct("<BBBII")
"""Form, least exponent, number of buckets, bytes of tables, number of words."""
SYMBOLS, ANS_STATES = 108, 16
TOTAL_WEIGHT = 1 << 12
"""The sum of the weights in a table."""
STEPS_PER_OCTAVE = 8
WEIGHTS = np.array(
    [
        *range(STEPS_PER_OCTAVE),
        *((STEPS_PER_OCTAVE + i) << octave for octave in range(9) for i in range(STEPS_PER_OCTAVE)),
    ]
)
"""The weights by their numbers in files: all below 16, then eight per octave."""
MIDPOINTS = (WEIGHTS[1:] + WEIGHTS[:-1]) / 2


def encode_ans_steps(predicted: Array, actual: Array, buckets: ExponentBuckets) -> bytes | None:
    """Return residuals with a symbol for each value; None if they take more bytes than the values.

    `predicted`, `actual`: (n,) uint16.
    """
    which = bucket_of(predicted, buckets)
    symbols, counts, bits = deltas.count_step_symbols(predicted, actual, which, buckets.count)
    rows = _table_rows(counts)
    states, words = deltas.write_ans_steps(symbols, _weights(rows))
    buffer = thread_buffer("tables", 2 * rows.size)
    tables = buffer[: deltas.write_rows(rows.reshape(-1), 1 + SYMBOLS, buffer)]
    head = HEAD.pack(ANS_STEPS, buckets.min_exponent, buckets.count, tables.size, words.size)
    residuals = b"".join([head, tables.data, states.data, words.data, bits.data])
    return residuals if len(residuals) < actual.nbytes else None


def decode_ans_steps(data: Bytes, predicted: Array, mantissa_bits: int) -> Array:
    """Return the actual bits, (n,) uint16. `data`: untrusted bytes. `predicted`: (n,) uint16.

    Raises:
        CodecError: The residuals are damaged.
    """
    if len(data) < HEAD.size:
        raise CodecError("residuals of ANS steps end in their head")
    _, min_exponent, count, tables_nbytes, word_count = HEAD.unpack_from(data)
    states_start = HEAD.size + tables_nbytes
    words_start = states_start + 4 * ANS_STATES
    bits_start = words_start + 2 * word_count
    if not 1 <= count <= MAX_BUCKETS or bits_start + deltas.PADDING > len(data):
        raise CodecError("the head of residuals of ANS steps is damaged")
    content = np.frombuffer(data, np.uint8)
    rows = np.empty((count, 1 + SYMBOLS), np.uint8)
    if not deltas.read_rows(content[HEAD.size : states_start], 1 + SYMBOLS, rows.reshape(-1)):
        raise CodecError("a table of weights is damaged")
    which = bucket_of(predicted, ExponentBuckets(mantissa_bits, min_exponent, count))
    states = content[states_start:words_start].copy().view(np.uint32)
    words = content[words_start:bits_start].copy().view(np.uint16)
    actual = np.empty_like(predicted)
    if not deltas.read_ans_steps(predicted, which, _weights(rows), states, words, content[bits_start:], actual):
        raise CodecError("residuals of ANS steps are damaged")
    return actual


def _table_rows(counts: Array) -> Array:
    """Return the table of each bucket: (buckets, 109) uint8. `counts`: (buckets, 108) uint32.

    A row has the symbol that takes the remaining weight, then the number of each symbol's weight.
    """
    rows = np.zeros((len(counts), 1 + SYMBOLS), np.uint8)
    first, each = counts.argmax(axis=1), np.arange(len(counts))
    shares = counts * (TOTAL_WEIGHT / np.maximum(counts.sum(axis=1, dtype=np.int64), 1))[:, None]
    numbers = np.where(counts > 0, np.maximum(np.searchsorted(MIDPOINTS, shares, side="right"), 1), 0)
    numbers[each, first] = 0
    while (full := WEIGHTS[numbers].sum(axis=1) >= TOTAL_WEIGHT).any():
        numbers[full, numbers[full].argmax(axis=1)] -= 1
    rows[:, 0], rows[:, 1:] = first, numbers
    return rows


def _weights(rows: Array) -> Array:
    """Return the weight of each bucket's symbols: (buckets, 108) uint32, of sum TOTAL_WEIGHT. `rows`: untrusted."""
    first, numbers, each = rows[:, 0], rows[:, 1:], np.arange(len(rows))
    if (first >= SYMBOLS).any() or (numbers >= WEIGHTS.size).any() or numbers[each, first].any():
        raise CodecError("a table has symbols or weights that do not exist")
    weights = WEIGHTS[numbers]
    remaining = TOTAL_WEIGHT - weights.sum(axis=1)
    if (remaining < 1).any():
        raise CodecError("the weights of a table are too large")
    weights[each, first] = remaining
    table: Array = weights.astype(np.uint32)
    return table
