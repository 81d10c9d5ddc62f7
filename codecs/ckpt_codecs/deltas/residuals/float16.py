"""Residuals of 16-bit floats: differences of their bits, in buckets by the exponents of the predictions."""

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.deltas.format_ids import MAX_BUCKETS, SPARSE_STEPS
from ckpt_codecs.deltas.residuals.ans_steps import decode_ans_steps, encode_ans_steps
from ckpt_codecs.deltas.residuals.exponent_buckets import buckets_for
from ckpt_codecs.deltas.residuals.sparse_steps import decode_sparse_steps, encode_sparse_steps
from ckpt_codecs.scratch import thread_buffer

MAX_SPARSE_SHARE = 0.06
"""The share of changed values below which their places are stored."""
MAX_SPARSE_VALUES = 1 << 13
"""Values up to which tables of weights save less than they take."""
FEW_BUCKETS = 8
"""Buckets of so few values."""


def encode_float16(predicted: Array, actual: Array, mantissa_bits: int) -> bytes | None:
    """Return residuals of `actual`, (n,) uint16; None if they take more bytes than the values.

    `predicted`: (n,) uint16. `mantissa_bits`: 7 for bfloat16, 10 for float16.
    """
    is_small, changed = actual.size <= MAX_SPARSE_VALUES, count_changed(predicted, actual)
    if not changed:
        return bytes([0])
    buckets = buckets_for(predicted, mantissa_bits, FEW_BUCKETS if is_small else MAX_BUCKETS)
    if is_small or changed < MAX_SPARSE_SHARE * actual.size:
        return encode_sparse_steps(predicted, actual, buckets, changed)
    return encode_ans_steps(predicted, actual, buckets)


def decode_float16(data: Bytes, predicted: Array, mantissa_bits: int) -> Array:
    """Return the actual bits, (n,) uint16. `predicted`: (n,) uint16.

    `data`: untrusted bytes; the first one is SPARSE_STEPS or ANS_STEPS.

    Raises:
        CodecError: The residuals are damaged.
    """
    if data[0] == SPARSE_STEPS:
        return decode_sparse_steps(data, predicted, mantissa_bits)
    return decode_ans_steps(data, predicted, mantissa_bits)


def count_changed(predicted: Array, actual: Array) -> int:
    """Return how many values differ. `predicted`, `actual`: (n,) uint16."""
    changed = thread_buffer("changed", actual.size).view(np.bool_)
    return int(np.count_nonzero(np.not_equal(predicted, actual, out=changed)))
