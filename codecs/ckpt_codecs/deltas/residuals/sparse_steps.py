"""Residuals of 16-bit floats of which few change: the places of the changes, and their steps."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.deltas.format_ids import MAX_BUCKETS, SPARSE_STEPS
from ckpt_codecs.deltas.residuals.exponent_buckets import ExponentBuckets, bucket_of
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas
from ckpt_codecs.scratch import thread_buffer

HEAD = Struct("<BBB")
"""Form, least exponent, number of buckets."""
GAP_OCTAVES = 2
"""Octaves from the mean gap of a bucket down to the unit in which its gaps are coded."""
MAX_SHIFT = 24


def encode_sparse_steps(predicted: Array, actual: Array, buckets: ExponentBuckets, changed: int) -> bytes | None:
    """Return residuals with the places of the `changed` values that differ; None if they take more than the values.

    `predicted`, `actual`: (n,) uint16.
    """
    which = bucket_of(predicted, buckets)
    steps = deltas.find_steps(predicted, actual, which, buckets.count, changed)
    bucket_of_step, _, _, bucket_sizes, _ = steps
    mean_gaps = (bucket_sizes + 1) / (np.bincount(bucket_of_step, minlength=buckets.count) + 1)
    shifts = np.clip(np.frexp(mean_gaps)[1] - 1 - GAP_OCTAVES, 0, MAX_SHIFT).astype(np.uint8)
    out = thread_buffer("changes", 2 * actual.size)
    nbytes = deltas.write_sparse_steps(*steps, shifts, out)
    head = HEAD.pack(SPARSE_STEPS, buckets.min_exponent, buckets.count)
    return None if nbytes > out.size else head + out[:nbytes].tobytes()


def decode_sparse_steps(data: Bytes, predicted: Array, mantissa_bits: int) -> Array:
    """Return the actual bits, (n,) uint16. `data`: untrusted bytes. `predicted`: (n,) uint16.

    Raises:
        CodecError: The residuals are damaged.
    """
    if len(data) < HEAD.size:
        raise CodecError("residuals of sparse steps end in their head")
    _, min_exponent, count = HEAD.unpack_from(data)
    if not 1 <= count <= MAX_BUCKETS:
        raise CodecError("the head of residuals of sparse steps is damaged")
    which = bucket_of(predicted, ExponentBuckets(mantissa_bits, min_exponent, count))
    bucket_sizes, actual = deltas.count_contexts(which, count), np.empty_like(predicted)
    content = np.frombuffer(data, np.uint8, offset=HEAD.size)
    if not deltas.read_sparse_steps(content, predicted, which, bucket_sizes, actual):
        raise CodecError("residuals of sparse steps are damaged")
    return actual
