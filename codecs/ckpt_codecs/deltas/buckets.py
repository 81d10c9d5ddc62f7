"""Differences of 16-bit floats, told apart by the exponents of the earlier values: small ones go many steps."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes, DType
from ckpt_codecs.chunks import Writer, read
from ckpt_codecs.deltas import rare
from ckpt_codecs.deltas.contexts import apart, together
from ckpt_codecs.deltas.engine import delta_engine
from ckpt_codecs.deltas.kinds import BUCKETS, MOST_BUCKETS, RARE
from ckpt_codecs.deltas.plain import sampled
from ckpt_codecs.errors import CodecError
from ckpt_codecs.streams import Effort

HEAD = Struct("<BBBI")
"""The form, the least bucket, how many there are, how many differences have no symbol."""
MANTISSA = {"bfloat16": 7, "float16": 10}
ESCAPE = 255
SELDOM = 0.06
"""The share of values that change, below which it pays to say where."""
FEW = 1 << 13
"""Values that are too few for tables."""
USUAL = 8
"""Buckets that have a table each."""


def encode_buckets(foretold: Array, found: Array, dtype: DType, effort: Effort) -> bytes | None:
    """A part of differences in buckets; None if it would be larger than the values."""
    size = found.size
    low, high = np.empty(size, np.uint8), np.empty(size, np.uint8)
    delta_engine().steps(foretold, found, [low, high])
    large = np.flatnonzero((high != 0) | (low == ESCAPE))
    rest = [low[large], high[large]]
    low[large] = ESCAPE
    seldom = size <= FEW or np.count_nonzero(low) < SELDOM * size
    least, many = _span(foretold, dtype, MOST_BUCKETS if seldom and size > FEW else USUAL)
    which = delta_engine().buckets(foretold, MANTISSA[dtype.name], least, many)
    if seldom:
        coded = rare.encode(low, which, many, rest, effort)
        return None if coded is None else HEAD.pack(RARE, least, many, large.size) + coded
    writer = Writer(BUCKETS, many + 2, size + 2 * large.size)
    for plane in [*together(low, which, many), *rest]:
        writer.add(plane, effort)
    made = writer.data(size * found.itemsize)
    return None if made is None else HEAD.pack(BUCKETS, least, many, large.size) + made


def decode_buckets(data: Bytes, foretold: Array, dtype: DType) -> Array:
    if len(data) < HEAD.size or dtype.name not in MANTISSA:
        raise CodecError("a part of buckets ends in its head, or is of another type")
    form, least, many, escaped = HEAD.unpack_from(data)
    if not 1 <= many <= MOST_BUCKETS or escaped > foretold.size:
        raise CodecError("the head of a part of buckets is damaged")
    which = delta_engine().buckets(foretold, MANTISSA[dtype.name], least, many)
    counts = delta_engine().count(which, many)
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
        delta_engine().stepped(foretold, [symbols], out)
        return out
    above = np.zeros(foretold.size, np.uint8)
    symbols[large], above[large] = low, high
    delta_engine().stepped(foretold, [symbols, above], out)
    return out


def _span(foretold: Array, dtype: DType, most: int) -> tuple[int, int]:
    """The least bucket, and how many."""
    exponent = sampled(foretold) << np.uint16(1) >> np.uint16(MANTISSA[dtype.name] + 1)
    highest = int(np.quantile(exponent, 0.995)) if exponent.size else 0
    return max(highest - most + 1, 0), min(most, highest + 1)
