"""Residuals of halves of which few change, or which are few: where, and by how much."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.deltas.format_ids import CHANGES, MOST_BUCKETS
from ckpt_codecs.deltas.residuals.exponent_buckets import ExponentBuckets, bucket_of
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas
from ckpt_codecs.scratch import thread_buffer

HEAD = Struct("<BBB")
"""The form, the least exponent, how many buckets."""
FINE = 2
"""Octaves from a usual gap to the steps in which gaps are told."""
MOST_SHIFT = 24


def encode_sparse_steps(foretold: Array, found: Array, span: ExponentBuckets, changed: int) -> bytes | None:
    """A part that says where values change, `changed` of them; None if it would be larger than the values."""
    which = bucket_of(foretold, span)
    buckets, gaps, steps, sizes, first_gaps = deltas.find_steps(foretold, found, which, span.many, changed)
    often = (sizes + 1) / (np.bincount(buckets, minlength=span.many) + 1)
    kinds = np.clip(np.frexp(often)[1] - 1 - FINE, 0, MOST_SHIFT).astype(np.uint8)
    out = thread_buffer("changes", 2 * found.size)
    used = deltas.write_sparse_steps(buckets, gaps, steps, sizes, first_gaps, kinds, out)
    return None if used > out.size else HEAD.pack(CHANGES, span.least, span.many) + out[:used].tobytes()


def decode_sparse_steps(data: Bytes, foretold: Array, mantissa: int) -> Array:
    if len(data) < HEAD.size:
        raise CodecError("a part of changes ends in its head")
    _, least, many = HEAD.unpack_from(data)
    if not 1 <= many <= MOST_BUCKETS:
        raise CodecError("the head of a part of changes is damaged")
    which = bucket_of(foretold, ExponentBuckets(mantissa, least, many))
    sizes, out = deltas.count_contexts(which, many), np.empty_like(foretold)
    if not deltas.read_sparse_steps(np.frombuffer(data, np.uint8, offset=HEAD.size), foretold, which, sizes, out):
        raise CodecError("a part of changes is damaged")
    return out
