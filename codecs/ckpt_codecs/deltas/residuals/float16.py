"""Residuals of 16-bit floats: differences of their words, told apart by the exponents of what foretells them."""

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.deltas.format_ids import CHANGES, MOST_BUCKETS, TABLES
from ckpt_codecs.deltas.residuals.ans_steps import decode_ans_steps, encode_ans_steps
from ckpt_codecs.deltas.residuals.exponent_buckets import buckets_for
from ckpt_codecs.deltas.residuals.old_buckets import decode_buckets
from ckpt_codecs.deltas.residuals.sparse_steps import decode_sparse_steps, encode_sparse_steps
from ckpt_codecs.scratch import thread_buffer

SELDOM = 0.06
"""The share of values that change, below which it pays to say where."""
FEW = 1 << 13
"""Values that are too few for tables."""
USUAL = 8
"""Buckets of so few values."""


def encode_float16(foretold: Array, found: Array, mantissa: int) -> bytes | None:
    """A part; None if it would be larger than the values."""
    few, changed = found.size <= FEW, count_changed(foretold, found)
    if not changed:
        return bytes([0])
    span = buckets_for(foretold, mantissa, USUAL if few else MOST_BUCKETS)
    if few or changed < SELDOM * found.size:
        return encode_sparse_steps(foretold, found, span, changed)
    return encode_ans_steps(foretold, found, span)


def decode_float16(data: Bytes, foretold: Array, mantissa: int) -> Array:
    if data[0] == CHANGES:
        return decode_sparse_steps(data, foretold, mantissa)
    if data[0] == TABLES:
        return decode_ans_steps(data, foretold, mantissa)
    return decode_buckets(data, foretold, mantissa)


def count_changed(foretold: Array, found: Array) -> int:
    changed = thread_buffer("changed", found.size).view(np.bool_)
    return int(np.count_nonzero(np.not_equal(foretold, found, out=changed)))
