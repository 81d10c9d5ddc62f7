"""Differences of 16-bit floats as version 0.3.0 wrote them: read, and written no more."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import read_chunk
from ckpt_codecs.deltas.format_ids import MAX_BUCKETS, RARE
from ckpt_codecs.deltas.residuals import old_sparse as rare
from ckpt_codecs.deltas.residuals.contexts import undo_grouping
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas

HEAD = Struct("<BBBI")
"""The form, the least bucket, how many there are, how many differences have no symbol."""
ESCAPE = 255


def decode_buckets(data: Bytes, predicted: Array, mantissa: int) -> Array:
    """Return the actual bits, (n,) uint16. `predicted`: (n,) uint16. Raises CodecError if `data` is damaged."""
    if len(data) < HEAD.size:
        raise CodecError("a part of buckets ends in its head")
    form_id, least, many, escaped = HEAD.unpack_from(data)
    if not 1 <= many <= MAX_BUCKETS or escaped > predicted.size:
        raise CodecError("the head of a part of buckets is damaged")
    which = deltas.exponent_buckets(predicted, mantissa, least, many)
    counts = deltas.count_contexts(which, many)
    if form_id == RARE:
        symbols, low, high = rare.decode(data[HEAD.size :], which, counts, [escaped, escaped])
    else:
        *groups, low, high = read_chunk(data[HEAD.size :], [*counts.tolist(), escaped, escaped], "buckets")
        symbols = undo_grouping(groups, which)
    large = np.flatnonzero(symbols == ESCAPE)
    if large.size != escaped:
        raise CodecError("a part of buckets has more differences, or fewer, than it says")
    out = np.empty_like(predicted)
    if not escaped:
        deltas.merge_zigzags(predicted, [symbols], out)
        return out
    above = np.zeros(predicted.size, np.uint8)
    symbols[large], above[large] = low, high
    deltas.merge_zigzags(predicted, [symbols, above], out)
    return out
