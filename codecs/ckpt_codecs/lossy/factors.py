"""Second moments as a row's factor times a column's, with a bounded residual (after Adafactor, Shazeer and Stern 2018).

All in whole numbers of eighths of an octave (`lattice`), so that anybody computes the same.
"""

from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.lossy import log_levels as lattice
from ckpt_codecs.lossy import symbol_coder as symbols
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed
from ckpt_codecs.lossy.logarithm import log2
from ckpt_codecs.native import lossy
from ckpt_codecs.scratch import thread_buffer

FORETOLD, HOLED, RESIDUAL = 1, 2, 4
"""Flags: factors less those of the state before; a map of zeros; residuals."""
_HEAD = Struct("<BBBh")
_FEWEST = -1016
"""The level of what is zero, in means."""
_SIGN, _INFINITE = 1 << 31, 0x7F800000


@dataclass(frozen=True)
class Factors:
    """Levels of the rows and of the columns, and all that they make: n x m of float32."""

    rows: Array
    columns: Array
    values: Array


@dataclass(frozen=True)
class PredictedFactors:
    """What the state before says of the levels of rows and columns: their mean levels."""

    rows: Array
    columns: Array
    something: bool
    """Is any of it not zero?"""

    @classmethod
    def by(cls, before: Array) -> "PredictedFactors":
        n, m = before.shape
        rows, columns = np.empty(n, np.int64), np.empty(m, np.int64)
        lossy.sum_levels(before, rows, columns)
        total = int(rows.sum())
        return cls(rows // m, columns // n - total // (n * m), total != _FEWEST * n * m)

    @classmethod
    def nothing(cls, shape: tuple[int, int]) -> "PredictedFactors":
        return cls(np.zeros(shape[0], np.int64), np.zeros(shape[1], np.int64), False)


def encode(values: Array, foretold: PredictedFactors | None, residual: int, grain: int) -> bytes:
    """Of n x m finite, positive float32. Residuals are multiples of `residual` levels, factors of `grain`.

    None is off by a factor of more than 2^((residual + grain + 1) / 16), but for denormals; zeros stay zeros.
    Raises `NotApplicable` where one is negative or no number.
    """
    n, m = values.shape
    by_row, by_column = np.empty(n), np.empty(m)
    least, most = lossy.sum_rows_and_columns(values, by_row, by_column)
    if most >= _INFINITE:
        raise NotApplicable("a second moment is negative" if most >= _SIGN else "a second moment is no number")
    by_row /= m
    by_column /= n
    mean = by_row.mean()
    flags = FORETOLD if foretold is not None and foretold.something else 0
    told = foretold if foretold is not None and flags else PredictedFactors.nothing((n, m))
    rows, columns = _levels(by_row) - told.rows, _levels(by_column / mean if mean else by_column) - told.columns
    offset = int(np.clip(np.median(np.rint(rows)), -30000, 30000))
    row_codes, column_codes = (np.rint(x / grain).astype(np.int32) for x in (rows - offset, columns))
    pieces = [symbols.encode(row_codes, n), symbols.encode(column_codes, m)]
    if not least:
        flags |= HOLED
        pieces.append(symbols.encode((values == 0).astype(np.int32), m))
    if residual:
        codes = _room(n * m).reshape(n, m)
        row_levels = (told.rows + offset + grain * row_codes).astype(np.int32)
        column_levels = (told.columns + grain * column_codes).astype(np.int32)
        total = lossy.encode_residuals(values, row_levels, column_levels, residual, lattice.fine_levels(), codes)
        if total:
            flags |= RESIDUAL
            pieces.append(symbols.encode(codes, m, total))
    return _HEAD.pack(flags, residual, grain, offset) + b"".join(map(length_prefixed, pieces))


def decode(data: bytes, foretold: PredictedFactors | None, out: Array) -> Factors:
    """With values in `out`, n x m of float32. Raises `CodecError` for what is damaged."""
    n, m = out.shape
    source = ByteReader(data)
    flags, residual, grain, offset = _HEAD.unpack(source.take(_HEAD.size))
    if not n * m:
        raise CodecError("nothing has no second moments")
    if flags & FORETOLD and foretold is None:
        raise CodecError("second moments need those before them")
    told = foretold if foretold is not None and flags & FORETOLD else PredictedFactors.nothing((n, m))
    rows = told.rows + offset + grain * symbols.decode(source.piece(), n, n).astype(np.int64)
    columns = told.columns + grain * symbols.decode(source.piece(), m, m).astype(np.int64)
    rows, columns = (np.clip(x, 2 * lattice.LOW, 2 * lattice.HIGH).astype(np.int32) for x in (rows, columns))
    zeros = codes = None
    if flags & HOLED:
        zeros = symbols.decode(source.piece(), n * m, m).reshape(out.shape)
    if flags & RESIDUAL:
        codes = symbols.decode(source.piece(), n * m, m, _room(n * m)).reshape(out.shape)
    source.end()
    lossy.decode_levels(rows, columns, residual, codes, zeros, out)
    return Factors(rows, columns, out)


def _room(count: int) -> Array:
    return thread_buffer("residuals", 4 * count).view(np.int32)


def _levels(means: Array) -> Array:
    levels: Array = np.maximum(log2(means) * 8, _FEWEST)
    return levels
