"""Planes that are mostly zero, as version 0.3.0 wrote them: read, and written no more."""

from struct import Struct

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import read_chunk
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas
from ckpt_codecs.scratch import thread_buffer

_SIZE = Struct("<I")
DENSE = 255
"""The kind of a context whose values are coded one by one; of others, the bits of a gap that are stored."""
MOST_BITS = 24


def decode(data: Bytes, which: Array, counts: Array, other_sizes: list[int]) -> list[Array]:
    """Return the plane, (n,) uint8, and other planes of these sizes. `which`: (n,) uint8; `counts`: (m,) int64."""
    used = _SIZE.unpack_from(data)[0] if len(data) >= _SIZE.size else which.size + 1
    if used > which.size:
        raise CodecError("a part of rare values ends in its head")
    *rest, kinds, coded = read_chunk(data[_SIZE.size :], [*other_sizes, counts.size, used], "rare")
    if ((kinds > MOST_BITS) & (kinds != DENSE)).any():
        raise CodecError("a part of rare values has gaps that are too long")
    gathered, plane = thread_buffer("gathered", which.size), thread_buffer("scattered", which.size)
    if not deltas.read_sparse_plane(coded, counts, kinds, gathered):
        raise CodecError("a part of rare values is damaged")
    deltas.scatter(which, gathered, plane)
    return [plane, *rest]
