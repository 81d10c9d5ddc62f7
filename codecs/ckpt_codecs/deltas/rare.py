"""Planes that are mostly zero, in contexts: of most, where the others are; of some, each value."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunks import Writer, read
from ckpt_codecs.deltas.contexts import together
from ckpt_codecs.deltas.engine import delta_engine
from ckpt_codecs.deltas.kinds import RARE
from ckpt_codecs.errors import CodecError
from ckpt_codecs.scratch import borrow
from ckpt_codecs.streams import Effort

_SIZE = Struct("<I")
DENSE = 255
"""The kind of a context whose values are coded one by one; of others, the bits of a gap that are stored."""
OFTEN = 0.1
"""The share of values that are not zero, above which that is done."""
FINE = 2
"""Octaves of a usual gap that are coded."""
MOST_BITS = 24


def encode(plane: Array, which: Array, contexts: int, others: list[Array], effort: Effort) -> bytes | None:
    """A chunk of other planes and of this one; None if it would take more than the plane's bytes."""
    groups = together(plane, which, contexts)
    kinds = np.array([_kind(group.size, int(np.count_nonzero(group))) for group in groups], np.uint8)
    counts = np.array([group.size for group in groups], np.int64)
    coded = borrow("seldom", plane.size)
    used = delta_engine().write_seldom(borrow("gathered", plane.size), counts, kinds, coded)
    if not used:
        return None
    parts = [*others, kinds, coded[:used]]
    writer = Writer(RARE, len(parts), sum(part.size for part in parts))
    for part in parts:
        writer.add(part, effort)
    made = writer.data(2 * plane.size)
    return None if made is None else _SIZE.pack(used) + made


def decode(data: Bytes, which: Array, counts: Array, others: list[int]) -> list[Array]:
    """The plane, and the others, which have such sizes."""
    used = _SIZE.unpack_from(data)[0] if len(data) >= _SIZE.size else which.size + 1
    if used > which.size:
        raise CodecError("a part of rare values ends in its head")
    *rest, kinds, coded = read(data[_SIZE.size :], [*others, counts.size, used], "rare")
    if ((kinds > MOST_BITS) & (kinds != DENSE)).any():
        raise CodecError("a part of rare values has gaps that are too long")
    gathered, plane = borrow("gathered", which.size), borrow("scattered", which.size)
    if not delta_engine().read_seldom(coded, counts, kinds, gathered):
        raise CodecError("a part of rare values is damaged")
    delta_engine().scatter(which, gathered, plane)
    return [plane, *rest]


def _kind(size: int, found: int) -> int:
    if found > OFTEN * size:
        return DENSE
    return min(max(int(np.log2(size / (found + 1) + 1)) - FINE, 0), MOST_BITS)
