"""Second moments some steps on: rows and columns grow and shrink together."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk.frame import ChunkWriter, read
from ckpt_codecs.chunk.streams import CodingLevel
from ckpt_codecs.deltas.format_ids import DRIFTED
from ckpt_codecs.deltas.residuals.choose import guess_steps
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossless.moments import columns_of
from ckpt_codecs.native import deltas

SIXTEENTH_OCTAVE = 19
"""Bits of a float32 below a sixteenth of an octave."""
FARTHEST = 127
ASKED = 128
"""Values of a row or of a column that tell its drift."""
_SIZE = Struct("<I")
EFFORT = CodingLevel(0.6)
"""Drifts are few: a code of their own must save much to be worth its table."""


def fit_drift(before: Array, after: Array, shape: Shape) -> tuple[Array, Array] | None:
    """Of each row, and then of each column, in sixteenths of an octave; None where it would gain nothing."""
    columns = columns_of(shape) if after.size else 0
    if not columns or after.size // columns < 8:
        return None
    few = slice(None, None, max(1, columns // ASKED))
    rows = np.round(_way(before, after, columns, (slice(None), few)).mean(axis=1, dtype=np.float32)).astype(np.int8)
    few = slice(None, None, max(1, rows.size // ASKED))
    by_column = np.round((_way(before, after, columns, (few,)) - rows[few, None]).mean(axis=0, dtype=np.float32))
    made = rows, np.clip(by_column, -FARTHEST, FARTHEST).astype(np.int8)
    gained = guess_steps(before, after) - guess_steps(apply_drift(before, *made), after)
    return made if gained * after.size > rows.size + columns else None


def _way(before: Array, after: Array, columns: int, some: tuple[slice, ...]) -> Array:
    """How far some values have come, in sixteenths of an octave."""
    earlier, later = (words.reshape(-1, columns)[some] for words in (before, after))
    way = (later - earlier).view(np.int32) >> np.int32(SIXTEENTH_OCTAVE)
    made: Array = np.clip(way, -FARTHEST, FARTHEST).astype(np.int16)
    return made


def apply_drift(before: Array, rows: Array, columns: Array) -> Array:
    """What foretells the words."""
    return deltas.apply_drift(before, rows, columns)


def encode_drift(rows: Array, columns: Array) -> bytes:
    writer = ChunkWriter(DRIFTED, 2, rows.size + columns.size)
    for part in (rows, columns):
        writer.add(part.view(np.uint8), EFFORT)
    made = writer.data(rows.size + columns.size + 64)
    assert made is not None
    return bytes([DRIFTED]) + _SIZE.pack(len(made)) + made


def decode_drift(part: memoryview, before: Array, shape: Shape) -> tuple[Array, memoryview]:
    """What foretells the words, and the bytes of the residuals."""
    if len(part) < 1 + _SIZE.size or before.itemsize != 4 or not before.size:
        raise CodecError("a part of drifts ends in its head, or is not of float32")
    end = 1 + _SIZE.size + _SIZE.unpack_from(part, 1)[0]
    if end > len(part):
        raise CodecError("a part of drifts ends in them")
    columns = columns_of(shape)
    made = read(part[1 + _SIZE.size : end], [before.size // columns, columns], "drift")
    return apply_drift(before, *(drift.view(np.int8) for drift in made)), part[end:]
