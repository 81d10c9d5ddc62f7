"""Differences of 16-bit floats as version 0.3.0 wrote them: read, and written no more."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import read
from ckpt_codecs.deltas.format_ids import MOST_BUCKETS, RARE
from ckpt_codecs.deltas.residuals import old_sparse as rare
from ckpt_codecs.deltas.residuals.contexts import apart
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas

HEAD = Struct("<BBBI")
"""The form, the least bucket, how many there are, how many differences have no symbol."""
ESCAPE = 255


def decode_buckets(data: Bytes, foretold: Array, mantissa: int) -> Array:
    if len(data) < HEAD.size:
        raise CodecError("a part of buckets ends in its head")
    form, least, many, escaped = HEAD.unpack_from(data)
    if not 1 <= many <= MOST_BUCKETS or escaped > foretold.size:
        raise CodecError("the head of a part of buckets is damaged")
    which = deltas.exponent_buckets(foretold, mantissa, least, many)
    counts = deltas.count_contexts(which, many)
    if form == RARE:
        symbols, low, high = rare.decode(data[HEAD.size :], which, counts, [escaped, escaped])
    else:
        *groups, low, high = read(data[HEAD.size :], [*counts.tolist(), escaped, escaped], "buckets")
        symbols = apart(groups, which)
    large = np.flatnonzero(symbols == ESCAPE)
    if large.size != escaped:
        raise CodecError("a part of buckets has more differences, or fewer, than it says")
    out = np.empty_like(foretold)
    if not escaped:
        deltas.merge_zigzags(foretold, [symbols], out)
        return out
    above = np.zeros(foretold.size, np.uint8)
    symbols[large], above[large] = low, high
    deltas.merge_zigzags(foretold, [symbols, above], out)
    return out
