"""The drift of second moments over several steps: whole rows and columns grow or shrink together."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk.frame import ChunkWriter, read_chunk
from ckpt_codecs.chunk.streams import CodingLevel
from ckpt_codecs.deltas.format_ids import DRIFTED
from ckpt_codecs.deltas.residuals.choose import estimate_zigzags
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossless.moments import columns_of
from ckpt_codecs.native import deltas

SIXTEENTH_OCTAVE = 19
"""Bits of a float32 below a sixteenth of an octave."""
MAX_DRIFT = 127
"""In sixteenths of an octave: drifts are int8."""
SAMPLED = 128
"""Values of a row or of a column that are compared."""
MIN_ROWS = 8
_SIZE = Struct("<I")
DRIFT_LEVEL = CodingLevel(0.6)
"""The level of the drifts' streams: they are short, so a code must save much to be worth its table."""


def fit_drift(before: Array, after: Array, shape: Shape) -> tuple[Array, Array] | None:
    """Return the drift of each row, (n,) int8, and then of each column, (m,) int8; None if they save nothing.

    Drifts are in sixteenths of an octave. `before`, `after`: (n * m,) uint32, the bits of float32 of this shape.
    """
    columns = columns_of(shape) if after.size else 0
    if not columns or after.size // columns < MIN_ROWS:
        return None
    sampled = slice(None, None, max(1, columns // SAMPLED))
    by_row = _growth(before, after, columns, (slice(None), sampled)).mean(axis=1, dtype=np.float32)
    rows = np.round(by_row).astype(np.int8)
    sampled = slice(None, None, max(1, rows.size // SAMPLED))
    remaining = _growth(before, after, columns, (sampled,)) - rows[sampled, None]
    by_column = np.round(remaining.mean(axis=0, dtype=np.float32))
    drift = rows, np.clip(by_column, -MAX_DRIFT, MAX_DRIFT).astype(np.int8)
    saved = estimate_zigzags(before, after) - estimate_zigzags(apply_drift(before, *drift), after)
    return drift if saved * after.size > rows.size + columns else None


def _growth(before: Array, after: Array, columns: int, index: tuple[slice, ...]) -> Array:
    """Return how much some values grew, in sixteenths of an octave: (rows, columns) int16 of that index."""
    earlier, later = (bits.reshape(-1, columns)[index] for bits in (before, after))
    difference = (later - earlier).view(np.int32) >> np.int32(SIXTEENTH_OCTAVE)
    growth: Array = np.clip(difference, -MAX_DRIFT, MAX_DRIFT).astype(np.int16)
    return growth


def apply_drift(before: Array, rows: Array, columns: Array) -> Array:
    """Return the predicted bits, (n * m,) uint32.

    `before`: (n * m,) uint32. `rows`: (n,) int8. `columns`: (m,) int8.
    """
    return deltas.apply_drift(before, rows, columns)


def encode_drift(rows: Array, columns: Array) -> bytes:
    """Return the head of a part. `rows`: (n,) int8; `columns`: (m,) int8."""
    writer = ChunkWriter(DRIFTED, 2, rows.size + columns.size)
    for drifts in (rows, columns):
        writer.add(drifts.view(np.uint8), DRIFT_LEVEL)
    chunk = writer.finish(rows.size + columns.size + 64)
    assert chunk is not None
    return bytes([DRIFTED]) + _SIZE.pack(len(chunk)) + chunk


def decode_drift(part: memoryview, before: Array, shape: Shape) -> tuple[Array, memoryview]:
    """Return the predicted bits, (n * m,) uint32, and the bytes of the residuals.

    `part`: untrusted bytes. `before`: (n * m,) uint32, the bits of float32 of this shape.

    Raises:
        CodecError: The part is damaged, or `before` has another dtype.
    """
    if len(part) < 1 + _SIZE.size or before.itemsize != 4 or not before.size:
        raise CodecError("a part with drifts ends in its head, or is not of float32")
    end = 1 + _SIZE.size + _SIZE.unpack_from(part, 1)[0]
    if end > len(part):
        raise CodecError("a part with drifts ends in its drifts")
    columns = columns_of(shape)
    drifts = read_chunk(part[1 + _SIZE.size : end], [before.size // columns, columns], "drift")
    return apply_drift(before, *(drift.view(np.int8) for drift in drifts)), part[end:]
