"""Second moments as a row's factor times a column's, with a bounded residual (after Adafactor, Shazeer and Stern 2018).

All in whole numbers of eighths of an octave (`lattice`), so that anybody computes the same.
"""

from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import lattice, symbols
from ckpt_codecs.lossy.sections import Pieces, piece

FORETOLD, HOLED, RESIDUAL = 1, 2, 4
"""Flags: factors less those of the state before; a map of zeros; residuals."""
_HEAD = Struct("<BBBh")
_FEWEST = -1016
"""The level of what is zero, in means."""


@dataclass(frozen=True)
class Factors:
    """Levels of the rows and of the columns, and all that they make: n x m of float32."""

    rows: Array
    columns: Array
    values: Array


def encode(values: Array, before: Array | None, residual: int, grain: int) -> bytes:
    """Of n x m finite, positive float32. Residuals are multiples of `residual` levels, factors of `grain`.

    None is off by a factor of more than 2^((residual + grain + 1) / 16), but for denormals; zeros stay zeros.
    """
    n, m = values.shape
    by_row, by_column = values.mean(1, dtype=np.float64), values.mean(0, dtype=np.float64)
    mean = by_row.mean()
    if before is not None and not before.any():
        before = None
    of_rows, of_columns = _foretold(before, (n, m))
    rows, columns = _levels(by_row) - of_rows, _levels(by_column / mean if mean else by_column) - of_columns
    offset = int(np.clip(np.median(np.rint(rows)), -30000, 30000))
    row_codes, column_codes = (np.rint(x / grain).astype(np.int32) for x in (rows - offset, columns))
    rows, columns = of_rows + offset + grain * row_codes, of_columns + grain * column_codes
    flags = FORETOLD * (before is not None)
    pieces = [symbols.encode(row_codes, n), symbols.encode(column_codes, m)]
    zero = values == 0
    if zero.any():
        flags |= HOLED
        pieces.append(symbols.encode(zero.astype(np.int32), m))
    if residual:
        off = np.log2(np.where(zero, np.float32(1), values))
        off *= np.float32(8 / residual)
        off -= (rows / residual).astype(np.float32)[:, None]
        off -= (columns / residual).astype(np.float32)
        off[zero] = 0
        codes = np.rint(off).astype(np.int32)
        if codes.any():
            flags |= RESIDUAL
            pieces.append(symbols.encode(codes, m))
    return _HEAD.pack(flags, residual, grain, offset) + b"".join(map(piece, pieces))


def decode(data: bytes, before: Array | None, shape: tuple[int, int]) -> Factors:
    """Raises `CodecError` for what is damaged."""
    n, m = shape
    source = Pieces(data)
    flags, residual, grain, offset = _HEAD.unpack(source.take(_HEAD.size))
    if not n * m:
        raise CodecError("nothing has no second moments")
    if flags & FORETOLD and before is None:
        raise CodecError("second moments need those before them")
    of_rows, of_columns = _foretold(before if flags & FORETOLD else None, shape)
    rows = of_rows + offset + grain * symbols.decode(source.piece(), n, n).astype(np.int64)
    columns = of_columns + grain * symbols.decode(source.piece(), m, m).astype(np.int64)
    rows, columns = (np.clip(x, 2 * lattice.LOW, 2 * lattice.HIGH) for x in (rows, columns))
    zero = symbols.decode(source.piece(), n * m, m).reshape(shape) != 0 if flags & HOLED else None
    level = (rows[:, None] + columns).astype(np.int32)
    if flags & RESIDUAL:
        level += np.int32(residual) * np.clip(symbols.decode(source.piece(), n * m, m), -4096, 4096).reshape(shape)
    source.end()
    made = lattice.value(level)
    if zero is not None:
        made[zero] = 0
    return Factors(rows, columns, made)


def _levels(means: Array) -> Array:
    with np.errstate(divide="ignore"):
        levels: Array = np.maximum(np.log2(means) * 8, _FEWEST)
        return levels


def _foretold(before: Array | None, shape: tuple[int, int]) -> tuple[Array, Array]:
    """What the state before says of the levels of rows and columns: their mean levels."""
    n, m = shape
    if before is None:
        return np.zeros(n, np.int64), np.zeros(m, np.int64)
    level = lattice.rough(np.abs(before)).astype(np.int64)
    return level.sum(1) // m, level.sum(0) // n - level.sum() // (n * m)
