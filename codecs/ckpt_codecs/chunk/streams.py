"""Streams: the stored forms of planes of bytes. The kernels choose the form of each plane."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import DIGITS, ENTRY, STORED
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer


@dataclass(frozen=True)
class CodingLevel:
    """How much time an encoder spends on streams. A decoder does not depend on it."""

    max_ratio: float
    """A plane is coded if its stream is smaller than this share of it."""
    sampled: bool = True
    """Do not try to code a plane if a sample of it predicts that its stream is larger."""


LEVELS = {"fast": CodingLevel(0.95), "default": CodingLevel(0.98), "max": CodingLevel(1.0, sampled=False)}


def encode(plane: Array, out: Array, start: int, level: CodingLevel, always_try: bool = False) -> tuple[int, int]:
    """Write one stream to `out[start:]` and return its kind and size. Nothing is written for a stored plane.

    `plane`: (n,) uint8. `out`: uint8. `always_try`: code the plane without an estimate from a sample.
    """
    head = 1 + ENTRY
    chunk = np.concatenate([np.empty(head, np.uint8), plane])
    end = lossless.write_streams([plane.size], [level.max_ratio], [level.sampled and not always_try], chunk)
    if chunk[1] != STORED:
        out[start : start + end - head] = chunk[head:end]
    return int(chunk[1]), end - head


def decode(kind: int, source: Array, start: int, end: int, size: int, scratch: str) -> Array:
    """Return the plane of one stream, `source[start:end]` (uint8): (size,) uint8, a view or this thread's `scratch`."""
    return read(source, [kind], [start, end], [size], scratch)[0]


def read(source: Array, kinds: Sequence[int], starts: Sequence[int], sizes: Sequence[int], scratch: str) -> list[Array]:
    """Return the planes of streams: (sizes[i],) uint8 each, views of `source` or this thread's buffer `scratch`.

    `source`: uint8; stream i is `source[starts[i]:starts[i + 1]]`.

    Raises:
        CodecError: A stream is damaged.
    """
    if any(kinds) and max(kinds) > DIGITS:
        raise CodecError(f"no stream is of kind {max(kinds)}")
    places = list(accumulate(sizes, initial=0))
    buffer = thread_buffer(scratch, places[-1] if any(kinds) else 0)
    planes = []
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        stream = source[starts[i] : starts[i + 1]]
        if kind == STORED:
            if stream.size != size:
                raise CodecError(f"a stored stream of {stream.size} bytes is not one of {size}")
            planes.append(stream)
        else:
            planes.append(buffer[places[i] : places[i + 1]])
    if any(kinds):
        damaged = lossless.read_streams(source, kinds, starts, sizes, places[:-1], buffer)
        if damaged < len(sizes):
            raise CodecError(f"a stream of kind {kinds[damaged]} is damaged")
    return planes
