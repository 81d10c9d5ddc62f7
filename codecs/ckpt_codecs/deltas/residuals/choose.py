"""The choice of a form for residuals."""

import numpy as np

from ckpt_codecs.base import Array, Bytes, DType
from ckpt_codecs.chunk.frame import MAX_ELEMENTS, ChunkWriter, read_chunk
from ckpt_codecs.chunk.streams import LEVELS, CodingLevel
from ckpt_codecs.deltas.format_ids import ANS_STEPS, CONSTANT_UNIT, FLOAT32_GRID, MASKED_STEPS, SPARSE_STEPS
from ckpt_codecs.deltas.residuals.exponent_buckets import MANTISSA_BITS
from ckpt_codecs.deltas.residuals.float16 import decode_float16, encode_float16, encode_float16_fast
from ckpt_codecs.deltas.residuals.float32_grid import best_shift, decode_grid, encode_grid
from ckpt_codecs.deltas.residuals.second_moments import SecondMoments
from ckpt_codecs.deltas.unpredicted import sample_runs
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas, lossless

MIN_GRID_VALUES = 512
"""Values of float32 from which on a grid is tried."""
MIN_FLOAT16_VALUES = 16
"""Values of 16 bits from which on the forms for these are tried."""
FLOAT16_FORMS = (SPARSE_STEPS, ANS_STEPS, MASKED_STEPS)
"""The forms of residuals of 16-bit floats."""
MAX_SMALL_PLANES = 2
"""Planes of differences of float32 up to which a grid cannot save anything."""


def encode_residual(
    predicted: Array,
    actual: Array,
    dtype: DType,
    level: str,
    second_moments: SecondMoments,
    source: int = CONSTANT_UNIT,
    contexts: bool = False,
    fast: bool = False,
) -> bytes | None:
    """Return residuals in the form that suits; None if the values by themselves take fewer bytes.

    Args:
        predicted, actual: (n,) uint8, uint16, uint32 or uint64: the bits of values of `dtype`.
        source: Where the units of a grid come from.
        contexts: Use contexts for the symbols of a grid.
        fast: Use masked steps for 16-bit floats of which few change.
    """
    coding_level, size = LEVELS[level], actual.size
    if size > MAX_ELEMENTS:
        return None
    if dtype.name in MANTISSA_BITS and size >= MIN_FLOAT16_VALUES:
        encode = encode_float16_fast if fast else encode_float16
        residuals = encode(predicted, actual, MANTISSA_BITS[dtype.name])
        if residuals is not None:
            return residuals
    planes = (deltas.zigzag_bits(predicted, actual) + 7) // 8
    if size >= MIN_GRID_VALUES and planes > MAX_SMALL_PLANES and dtype.name == "float32":
        best = best_shift(predicted, actual, source, second_moments)
        if best is not None and best[1] < estimate_zigzags(predicted, actual):
            residuals = encode_grid(predicted, actual, source, best[0], contexts, second_moments, coding_level)
            if residuals is not None:
                return residuals
    return encode_zigzags(predicted, actual, planes, coding_level)


def decode_residual(data: Bytes, predicted: Array, dtype: DType, second_moments: SecondMoments) -> Array:
    """Return the actual bits: (n,) of the dtype of `predicted`.

    Args:
        data: Untrusted bytes, at least one.
        predicted: (n,) uint8, uint16, uint32 or uint64: the bits of values of `dtype`.

    Raises:
        CodecError: The residuals are damaged.
    """
    if data[0] <= predicted.itemsize:
        return decode_zigzags(data, predicted)
    if data[0] == FLOAT32_GRID:
        return decode_grid(data, predicted, second_moments)
    if data[0] in FLOAT16_FORMS and dtype.name in MANTISSA_BITS:
        decode_float16(data, predicted, MANTISSA_BITS[dtype.name], actual := np.empty_like(predicted))
        return actual
    raise CodecError(f"a part has no residuals of form {data[0]}")


def encode_zigzags(predicted: Array, actual: Array, planes: int, level: CodingLevel) -> bytes | None:
    """Return residuals as planes of zigzagged differences; None if they take more bytes than the values.

    `predicted`, `actual`: (n,) uint8, uint16, uint32 or uint64. `planes`: as many as the largest difference needs.
    """
    size = actual.size
    writer = ChunkWriter(planes, planes, size * actual.itemsize)
    buffers = [writer.plane(size, level) for _ in range(planes)]
    if planes:
        deltas.split_zigzags(predicted, actual, buffers)
    chunk = writer.finish(size * actual.itemsize + 1)
    return None if chunk is None else bytes(chunk)


def decode_zigzags(data: Bytes, predicted: Array) -> Array:
    """Return the actual bits, (n,) of the dtype of `predicted`: uint8, uint16, uint32 or uint64."""
    planes = read_chunk(data, [predicted.size] * data[0])
    if not planes:
        return predicted.copy()
    actual = np.empty_like(predicted)
    deltas.merge_zigzags(predicted, planes, actual)
    return actual


def estimate_zigzags(predicted: Array, actual: Array) -> float:
    """Return how many bytes per value planes of differences would take, estimated from a sample.

    `predicted`, `actual`: (n,) uint8, uint16, uint32 or uint64.
    """
    predicted, actual = sample_runs(predicted), sample_runs(actual)
    planes = [np.empty(actual.size, np.uint8) for _ in range(actual.itemsize)]
    deltas.split_zigzags(predicted, actual, planes)
    return sum(map(lossless.estimate_bits, planes)) / 8
