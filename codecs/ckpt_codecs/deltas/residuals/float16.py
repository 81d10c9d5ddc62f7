"""Residuals of 16-bit floats: differences of their bits, in buckets by the exponents of the predictions.

If few values change, the residuals are the places of the changes, and their steps. If many do, they are a symbol for
each step, coded by asymmetric numeral systems (Duda, arXiv 1311.2540): each bucket has a table of the symbols' weights.
"""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.deltas.format_ids import ANS_STEPS, MASKED_STEPS, MAX_BUCKETS, SPARSE_STEPS
from ckpt_codecs.deltas.residuals.exponent_buckets import ExponentBuckets, bucket_of, buckets_for
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas
from ckpt_codecs.scratch import thread_buffer

MAX_SPARSE_SHARE = 0.06
"""The share of changed values below which their places are stored."""
MAX_SPARSE_VALUES = 1 << 13
"""Values up to which tables of weights save less than they take."""
FEW_BUCKETS = 8
"""Buckets of so few values."""
MAX_TRIED_NBYTES = 256
"""Bytes of masked steps below which sparse steps, whose head is smaller, are tried, too."""
SPARSE_HEAD = Struct("<BBB")
"""Of sparse steps: form, least exponent, number of buckets."""
GAP_OCTAVES = 2
"""Octaves from the mean gap of a bucket down to the unit in which its gaps are coded."""
MAX_SHIFT = 24
ANS_HEAD = Struct("<BBBII")
"""Of ANS steps: form, least exponent, number of buckets, bytes of tables, number of words."""
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


def encode_float16(predicted: Array, actual: Array, mantissa_bits: int) -> bytes | None:
    """Return residuals of `actual`, (n,) uint16; None if they take more bytes than the values.

    `predicted`: (n,) uint16. `mantissa_bits`: 7 for bfloat16, 10 for float16.
    """
    is_small, changed = actual.size <= MAX_SPARSE_VALUES, deltas.count_changed(predicted, actual)
    if not changed:
        return bytes([0])
    buckets = buckets_for(predicted, mantissa_bits, FEW_BUCKETS if is_small else MAX_BUCKETS)
    if is_small or changed < MAX_SPARSE_SHARE * actual.size:
        return _encode_sparse_steps(predicted, actual, buckets, changed)
    return _encode_ans_steps(predicted, actual, buckets)


def encode_float16_fast(predicted: Array, actual: Array, mantissa_bits: int) -> bytes | None:
    """Return residuals of `actual`, (n,) uint16, as masked steps where these suit; else those of `encode_float16`.

    `predicted`: (n,) uint16. `mantissa_bits`: 7 for bfloat16, 10 for float16.
    """
    steps = deltas.write_masked_steps(predicted, actual, mantissa_bits)
    if steps is None:
        return encode_float16(predicted, actual, mantissa_bits)
    if not steps.size:
        return bytes([0])
    residuals = bytes([MASKED_STEPS]) + steps.tobytes()
    if len(residuals) >= MAX_TRIED_NBYTES:
        return residuals
    return min(encode_float16(predicted, actual, mantissa_bits) or residuals, residuals, key=len)


def decode_float16(data: Bytes, predicted: Array, mantissa_bits: int, out: Array) -> None:
    """Fill `out`, (n,) uint16, with the actual bits. `predicted`: (n,) uint16, which may be `out`.

    `data`: untrusted bytes; the first one is SPARSE_STEPS, ANS_STEPS or MASKED_STEPS.

    Raises:
        CodecError: The residuals are damaged. `out` is then undefined.
    """
    if data[0] == MASKED_STEPS:
        if not deltas.read_masked_steps(np.frombuffer(data, np.uint8, offset=1), predicted, mantissa_bits, out):
            raise CodecError("residuals of masked steps are damaged")
    elif data[0] == SPARSE_STEPS:
        _decode_sparse_steps(data, predicted, mantissa_bits, out)
    else:
        _decode_ans_steps(data, predicted, mantissa_bits, out)


def _encode_sparse_steps(predicted: Array, actual: Array, buckets: ExponentBuckets, changed: int) -> bytes | None:
    """Return residuals with the places of the `changed` values that differ; None if they take more than the values.

    `predicted`, `actual`: (n,) uint16.
    """
    steps = deltas.find_steps(predicted, actual, buckets.mantissa_bits, buckets.min_exponent, buckets.count, changed)
    bucket_of_step, _, _, bucket_sizes, _ = steps
    mean_gaps = (bucket_sizes + 1) / (np.bincount(bucket_of_step, minlength=buckets.count) + 1)
    shifts = np.clip(np.frexp(mean_gaps)[1] - 1 - GAP_OCTAVES, 0, MAX_SHIFT).astype(np.uint8)
    out = thread_buffer("changes", 2 * actual.size)
    nbytes = deltas.write_sparse_steps(*steps, shifts, out)
    head = SPARSE_HEAD.pack(SPARSE_STEPS, buckets.min_exponent, buckets.count)
    return None if nbytes > out.size else head + out[:nbytes].tobytes()


def _decode_sparse_steps(data: Bytes, predicted: Array, mantissa_bits: int, out: Array) -> None:
    """Fill `out`, (n,) uint16, with the actual bits. `data`: untrusted bytes. `predicted`: (n,) uint16.

    Raises:
        CodecError: The residuals are damaged.
    """
    if len(data) < SPARSE_HEAD.size:
        raise CodecError("residuals of sparse steps end in their head")
    _, min_exponent, count = SPARSE_HEAD.unpack_from(data)
    if not 1 <= count <= MAX_BUCKETS:
        raise CodecError("the head of residuals of sparse steps is damaged")
    content = np.frombuffer(data, np.uint8, offset=SPARSE_HEAD.size)
    if not deltas.read_sparse_steps(content, predicted, mantissa_bits, min_exponent, count, out):
        raise CodecError("residuals of sparse steps are damaged")


def _encode_ans_steps(predicted: Array, actual: Array, buckets: ExponentBuckets) -> bytes | None:
    """Return residuals with a symbol for each value; None if they take more bytes than the values.

    `predicted`, `actual`: (n,) uint16.
    """
    which = bucket_of(predicted, buckets)
    symbols, counts, bits = deltas.count_step_symbols(predicted, actual, which, buckets.count)
    rows = _table_rows(counts)
    states, words = deltas.write_ans_steps(symbols, _weights(rows))
    buffer = thread_buffer("tables", 2 * rows.size)
    tables = buffer[: deltas.write_rows(rows.reshape(-1), 1 + SYMBOLS, buffer)]
    head = ANS_HEAD.pack(ANS_STEPS, buckets.min_exponent, buckets.count, tables.size, words.size)
    residuals = b"".join([head, tables.data, states.data, words.data, bits.data])
    return residuals if len(residuals) < actual.nbytes else None


def _decode_ans_steps(data: Bytes, predicted: Array, mantissa_bits: int, out: Array) -> None:
    """Fill `out`, (n,) uint16, with the actual bits. `data`: untrusted bytes. `predicted`: (n,) uint16.

    Raises:
        CodecError: The residuals are damaged.
    """
    if len(data) < ANS_HEAD.size:
        raise CodecError("residuals of ANS steps end in their head")
    _, min_exponent, count, tables_nbytes, word_count = ANS_HEAD.unpack_from(data)
    states_start = ANS_HEAD.size + tables_nbytes
    words_start = states_start + 4 * ANS_STATES
    bits_start = words_start + 2 * word_count
    if not 1 <= count <= MAX_BUCKETS or bits_start + deltas.PADDING > len(data):
        raise CodecError("the head of residuals of ANS steps is damaged")
    content = np.frombuffer(data, np.uint8)
    rows = np.empty((count, 1 + SYMBOLS), np.uint8)
    if not deltas.read_rows(content[ANS_HEAD.size : states_start], 1 + SYMBOLS, rows.reshape(-1)):
        raise CodecError("a table of weights is damaged")
    which = bucket_of(predicted, ExponentBuckets(mantissa_bits, min_exponent, count))
    states = content[states_start:words_start].copy().view(np.uint32)
    words = content[words_start:bits_start].copy().view(np.uint16)
    if not deltas.read_ans_steps(predicted, which, _weights(rows), states, words, content[bits_start:], out):
        raise CodecError("residuals of ANS steps are damaged")


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
