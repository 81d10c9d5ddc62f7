"""Planes of bytes as streams: how each is held is decided by the kernels, plane by plane."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.old_streams import expand_inner
from ckpt_codecs.chunk.zstd import expand
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import DIGITS, ENTRY, HUF0, STORED
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer


@dataclass(frozen=True)
class CodingLevel:
    """How hard an encoder tries. Bytes mean the same at every level."""

    max_ratio: float
    """A plane is coded if it shrinks to less than this."""
    sampled: bool = True
    """Believe a sample that says that it will not."""


LEVELS = {"fast": CodingLevel(0.95), "default": CodingLevel(0.98), "max": CodingLevel(1.0, sampled=False)}


def encode(plane: Array, out: Array, at: int, effort: CodingLevel, sure: bool = False) -> tuple[int, int]:
    """A stream alone, to `out` from `at` on: its kind and size. Of a plane that is to be stored nothing is written."""
    begin = 1 + ENTRY
    made = np.concatenate([np.empty(begin, np.uint8), plane])
    end = lossless.write_streams([plane.size], [effort.max_ratio], [effort.sampled and not sure], made)
    if made[1] != STORED:
        out[at : at + end - begin] = made[begin:end]
    return int(made[1]), end - begin


def decode(kind: int, source: Array, at: int, end: int, size: int, scratch: str) -> Array:
    """The plane of a stream alone, `source[at:end]`: a view, or this thread's scratch."""
    return read(source, [kind], [at, end], [size], scratch)[0]


def read(source: Array, kinds: Sequence[int], starts: Sequence[int], sizes: Sequence[int], scratch: str) -> list[Array]:
    """The planes of streams, the i-th from `source[starts[i]:starts[i + 1]]`: views, or this thread's scratch."""
    if any(kinds) and max(kinds) > DIGITS:
        raise CodecError(f"no stream is of kind {max(kinds)}")
    places = list(accumulate(sizes, initial=0))
    room = thread_buffer(scratch, places[-1] if any(kinds) else 0)
    planes = []
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        stream = source[starts[i] : starts[i + 1]]
        if kind == STORED:
            if stream.size != size:
                raise CodecError(f"a stored stream of {stream.size} bytes is not one of {size}")
            planes.append(stream)
        else:
            planes.append(room[places[i] : places[i + 1]])
        if kind == HUF0:
            planes[-1][:] = np.frombuffer(expand(stream, size), np.uint8)
    begin = 0 if any(kinds) else len(sizes)
    while begin < len(sizes):
        given = kinds[begin:], starts[begin:], sizes[begin:], places[begin:-1]
        begin += lossless.read_streams(source, *given, room)
        if begin < len(sizes):
            _read_with_frames(kinds[begin], source[starts[begin] : starts[begin + 1]], planes[begin])
            begin += 1
    return planes


def _read_with_frames(kind: int, stream: Array, plane: Array) -> None:
    """Fill a plane from a stream that kernels refused: frames of zstd may be in it, else it is damaged."""
    stored = expand_inner(kind, stream, plane.size)
    if stored is None or not lossless.read_streams(stored, [kind], [0, stored.size], [plane.size], [0], plane):
        raise CodecError(f"a stream of kind {kind} is damaged")
