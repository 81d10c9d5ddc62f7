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

PREDICTED, HAS_ZEROS, RESIDUAL, RELATIVE = 1, 2, 4, 8
"""Flags: factors are stored less those of the step before; there is a map of zeros; there are residuals; these are less
the deviations of the step before."""
_HEAD = Struct("<BBBh")
_ZERO_LEVEL = -1016
"""The level of the value zero in means."""
_SIGN, _INFINITE = 1 << 31, 0x7F800000
_MOST_DEVIATION = 128
"""The bound of predicted deviations, in levels: 16 octaves."""
_READ_LEVEL = 1
"""What the level in the upper bits of a value is too low by, rounded: 0.9 on average."""
_LEAST_NORMAL, _LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


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
    before: Array | None = None
    """The second moments of the step before, (n, m) float32; None if there is no step before."""

    @classmethod
    def by(cls, before: Array) -> "PredictedFactors":
        """The prediction from the second moments of the step before, (n, m) float32, not empty."""
        n, m = before.shape
        rows, columns = np.empty(n, np.int64), np.empty(m, np.int64)
        lossy.sum_levels(before, rows, columns)
        total = int(rows.sum())
        return cls(rows // m, columns // n - total // (n * m), total != _ZERO_LEVEL * n * m, before)

    @classmethod
    def zero(cls, shape: tuple[int, int]) -> "PredictedFactors":
        """The prediction if there is no step before: all levels are 0."""
        return cls(np.zeros(shape[0], np.int64), np.zeros(shape[1], np.int64), False)

    def deviations(self) -> Array:
        """The level of each value of the step before, less those of its row and its column: (n, m) int32.

        It is 0 where the value was 0, and within `_MOST_DEVIATION`.
        """
        assert self.before is not None
        levels = (self.before.view(np.int32) & 0x7FFFFFFF) >> 20
        levels += _ZERO_LEVEL - self.rows[:, None].astype(np.int32)
        levels -= self.columns.astype(np.int32)
        np.clip(levels, -_MOST_DEVIATION, _MOST_DEVIATION, out=levels)
        levels[self.before == 0] = 0
        return levels


def encode(values: Array, predicted: PredictedFactors | None, residual: int, grain: int) -> bytes:
    """The bytes of second moments. `values`: (n, m) float32.

    Residuals are multiples of `residual` levels (0: none), factors are multiples of `grain` levels. With residuals,
    each decoded value is off by a factor of at most 2^((residual + grain + 1) / 16), except denormals. Zeros stay
    zeros. Raises `NotApplicable` if a value is negative or not finite, or in an only row and too small for it.
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
    relative_columns = by_column / mean if mean else by_column
    if n == 1 and np.any((relative_columns > 0) & (relative_columns < 2.0 ** (_ZERO_LEVEL / 8))):
        raise NotApplicable("a second moment of one row, which has no residuals, is below the lowest level")
    chosen = _Coded.of(values, _levels(by_row), _levels(relative_columns), predicted, residual, grain)
    if flags and chosen.total:
        relative = _Coded.relative(values, predicted, residual, grain)
        if relative is not None and relative.total < chosen.total:
            flags, chosen = flags | RELATIVE, relative
    parts = [symbol_coder.encode(chosen.rows, n), symbol_coder.encode(chosen.columns, m)]
    if not min_bits:
        flags |= HAS_ZEROS
        parts.append(symbol_coder.encode((values == 0).astype(np.int32), m))
    if chosen.total:
        flags |= RESIDUAL
        parts.append(symbol_coder.encode(chosen.residuals, m, chosen.total))
    return _HEAD.pack(flags, residual, grain, chosen.offset) + b"".join(map(length_prefixed, parts))


@dataclass(frozen=True)
class _Coded:
    """The symbols of second moments.

    `rows`: (n,) int32; `columns`: (m,) int32; `residuals`: (n, m) int32, or empty; `total`: the sum of the magnitudes.
    """

    offset: int
    rows: Array
    columns: Array
    residuals: Array
    total: int

    @classmethod
    def of(
        cls,
        values: Array,
        rows: Array,
        columns: Array,
        predicted: PredictedFactors,
        residual: int,
        grain: int,
        buffer: str = "residuals",
    ) -> "_Coded":
        """The symbols of values, (n, m) float32, with factors of the levels `rows`, (n,), and `columns`, (m,).

        `buffer`: the name of the residuals' buffer, which is valid until the next call with it.
        """
        rows, columns = rows - predicted.rows, columns - predicted.columns
        offset = int(np.clip(np.median(np.rint(rows)), -30000, 30000))
        row_codes, column_codes = (np.rint(x / grain).astype(np.int32) for x in (rows - offset, columns))
        if not residual:
            return cls(offset, row_codes, column_codes, np.empty(0, np.int32), 0)
        residuals = _buffer(buffer, values.size).reshape(values.shape)
        row_levels = (predicted.rows + offset + grain * row_codes).astype(np.int32)
        column_levels = (predicted.columns + grain * column_codes).astype(np.int32)
        total = lossy.encode_residuals(values, row_levels, column_levels, residual, log_levels.fine_levels(), residuals)
        return cls(offset, row_codes, column_codes, residuals, total)

    @classmethod
    def relative(cls, values: Array, predicted: PredictedFactors, residual: int, grain: int) -> "_Coded | None":
        """The same with residuals less the deviations of the step before; None if a value without its deviation is no
        normal number."""
        level = PredictedFactors.by(values)
        with np.errstate(over="ignore", under="ignore"):
            rest = values * log_levels.power(-8 * predicted.deviations())
        if np.any((rest < _LEAST_NORMAL) & (values > 0) | (rest > _LARGEST)):
            return None
        rows, columns = (level.rows + _READ_LEVEL).astype(float), level.columns.astype(float)
        return cls.of(rest, rows, columns, predicted, residual, grain, "relative residuals")


def decode(data: bytes, predicted: PredictedFactors | None, out: Array) -> Factors:
    """Decode second moments into `out`, (n, m) float32, and return their factors.

    Raises `CodecError` if the data is damaged.
    """
    n, m = out.shape
    source = ByteReader(data)
    flags, residual, grain, offset = _HEAD.unpack(source.take(_HEAD.size))
    if not n * m:
        raise CodecError("an empty chunk has no second moments")
    if flags >= 2 * RELATIVE or flags & (RELATIVE | PREDICTED) == RELATIVE:
        raise CodecError("the flags of second moments are damaged")
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
        codes = symbol_coder.decode(source.part(), n * m, m, _buffer("residuals", n * m)).reshape(out.shape)
    source.end()
    if flags & RELATIVE:
        deviations = predicted.deviations()
        if codes is not None:
            codes *= np.int32(residual)  # damaged ones may wrap around
            deviations += codes
        residual, codes = 1, deviations
    lossy.decode_levels(rows, columns, residual, codes, zeros, out)
    return Factors(rows, columns, out)


def _buffer(name: str, count: int) -> Array:
    """A buffer of this thread: (count,) int32, valid until the next call with this name."""
    return thread_buffer(name, 4 * count).view(np.int32)


def _levels(means: Array) -> Array:
    """The levels of means, not rounded. `means` and the result: float64, same shape."""
    levels: Array = np.maximum(log2(means) * 8, _ZERO_LEVEL)
    return levels
