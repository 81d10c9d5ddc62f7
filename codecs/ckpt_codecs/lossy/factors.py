"""Second moments as the product of row factors and column factors, with a bounded residual.

The factors are those of Adafactor (Shazeer and Stern, 2018). All values are integers, in levels of 1/8 octave
(`log_levels`), so every machine computes the same.
"""

from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.lossy import log_levels, symbol_coder
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed
from ckpt_codecs.lossy.logarithm import log2
from ckpt_codecs.native import lossy
from ckpt_codecs.scratch import thread_buffer

PREDICTED, HAS_ZEROS, RESIDUAL = 1, 2, 4
"""Flags: factors are stored less those of the step before; there is a map of zeros; there are residuals."""
_HEAD = Struct("<BBBh")
_ZERO_LEVEL = -1016
"""The level of the value zero in means."""
_SIGN, _INFINITE = 1 << 31, 0x7F800000


@dataclass(frozen=True)
class Factors:
    """The levels of rows, (n,) int32, and of columns, (m,) int32, and the second moments, (n, m) float32."""

    rows: Array
    columns: Array
    values: Array


@dataclass(frozen=True)
class PredictedFactors:
    """The levels of rows, (n,) int64, and columns, (m,) int64, as predicted: mean levels of the step before."""

    rows: Array
    columns: Array
    has_nonzero: bool
    """Is any value of the step before not zero?"""

    @classmethod
    def by(cls, before: Array) -> "PredictedFactors":
        """The prediction from the second moments of the step before, (n, m) float32, not empty."""
        n, m = before.shape
        rows, columns = np.empty(n, np.int64), np.empty(m, np.int64)
        lossy.sum_levels(before, rows, columns)
        total = int(rows.sum())
        return cls(rows // m, columns // n - total // (n * m), total != _ZERO_LEVEL * n * m)

    @classmethod
    def zero(cls, shape: tuple[int, int]) -> "PredictedFactors":
        """The prediction if there is no step before: all levels are 0."""
        return cls(np.zeros(shape[0], np.int64), np.zeros(shape[1], np.int64), False)


def encode(values: Array, predicted: PredictedFactors | None, residual: int, grain: int) -> bytes:
    """The bytes of second moments. `values`: (n, m) float32.

    Residuals are multiples of `residual` levels (0: none), factors are multiples of `grain` levels. With residuals,
    each decoded value is off by a factor of at most 2^((residual + grain + 1) / 16), except denormals. Zeros stay
    zeros. Raises `NotApplicable` if a value is negative or not finite.
    """
    n, m = values.shape
    by_row, by_column = np.empty(n), np.empty(m)
    min_bits, max_bits = lossy.sum_rows_and_columns(values, by_row, by_column)
    if max_bits >= _INFINITE:
        raise NotApplicable("a second moment is negative" if max_bits >= _SIGN else "a second moment is not finite")
    by_row /= m
    by_column /= n
    mean = by_row.mean()
    flags = PREDICTED if predicted is not None and predicted.has_nonzero else 0
    if predicted is None or not flags:
        predicted = PredictedFactors.zero((n, m))
    rows = _levels(by_row) - predicted.rows
    columns = _levels(by_column / mean if mean else by_column) - predicted.columns
    offset = int(np.clip(np.median(np.rint(rows)), -30000, 30000))
    row_codes, column_codes = (np.rint(x / grain).astype(np.int32) for x in (rows - offset, columns))
    parts = [symbol_coder.encode(row_codes, n), symbol_coder.encode(column_codes, m)]
    if not min_bits:
        flags |= HAS_ZEROS
        parts.append(symbol_coder.encode((values == 0).astype(np.int32), m))
    if residual:
        codes = _residuals_buffer(n * m).reshape(n, m)
        row_levels = (predicted.rows + offset + grain * row_codes).astype(np.int32)
        column_levels = (predicted.columns + grain * column_codes).astype(np.int32)
        total = lossy.encode_residuals(values, row_levels, column_levels, residual, log_levels.fine_levels(), codes)
        if total:
            flags |= RESIDUAL
            parts.append(symbol_coder.encode(codes, m, total))
    return _HEAD.pack(flags, residual, grain, offset) + b"".join(map(length_prefixed, parts))


def decode(data: bytes, predicted: PredictedFactors | None, out: Array) -> Factors:
    """Decode second moments into `out`, (n, m) float32, and return their factors.

    Raises `CodecError` if the data is damaged.
    """
    n, m = out.shape
    source = ByteReader(data)
    flags, residual, grain, offset = _HEAD.unpack(source.take(_HEAD.size))
    if not n * m:
        raise CodecError("an empty chunk has no second moments")
    if not flags & PREDICTED:
        predicted = PredictedFactors.zero((n, m))
    if predicted is None:
        raise CodecError("second moments need those before them")
    rows = predicted.rows + offset + grain * symbol_coder.decode(source.part(), n, n).astype(np.int64)
    columns = predicted.columns + grain * symbol_coder.decode(source.part(), m, m).astype(np.int64)
    rows, columns = (np.clip(x, 2 * log_levels.LOW, 2 * log_levels.HIGH).astype(np.int32) for x in (rows, columns))
    zeros = codes = None
    if flags & HAS_ZEROS:
        zeros = symbol_coder.decode(source.part(), n * m, m).reshape(out.shape)
    if flags & RESIDUAL:
        codes = symbol_coder.decode(source.part(), n * m, m, _residuals_buffer(n * m)).reshape(out.shape)
    source.end()
    lossy.decode_levels(rows, columns, residual, codes, zeros, out)
    return Factors(rows, columns, out)


def _residuals_buffer(count: int) -> Array:
    """A buffer of this thread for residuals: (count,) int32, valid until the next call."""
    return thread_buffer("residuals", 4 * count).view(np.int32)


def _levels(means: Array) -> Array:
    """The levels of means, not rounded. `means` and the result: float64, same shape."""
    levels: Array = np.maximum(log2(means) * 8, _ZERO_LEVEL)
    return levels
