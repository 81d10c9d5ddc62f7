"""How far words are from what foretold them: the forms, and which of them to try."""

import numpy as np

from ckpt_codecs.base import Array, Bytes, DType
from ckpt_codecs.chunk.frame import MAX_ELEMENTS, ChunkWriter, read
from ckpt_codecs.chunk.streams import LEVELS, CodingLevel
from ckpt_codecs.deltas.format_ids import BUCKETS, CHANGES, CONSTANT_UNIT, GRID, RARE, TABLES
from ckpt_codecs.deltas.residuals.exponent_buckets import MANTISSA
from ckpt_codecs.deltas.residuals.float16 import decode_float16, encode_float16
from ckpt_codecs.deltas.residuals.float32_grid import best_shift, decode_grid, encode_grid
from ckpt_codecs.deltas.residuals.second_moments import SecondMoments
from ckpt_codecs.deltas.unpredicted import sampled
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas, lossless

MIN_ELEMENTS = 512
"""Values that are worth tables."""
LEAST_HALVES = 16
"""Values of 16 bits that are worth a model."""
FEW_PLANES = 2
"""Planes of differences of float32 that leave a grid nothing to save."""


def encode_residual(
    foretold: Array,
    found: Array,
    dtype: DType,
    level: str,
    told: SecondMoments,
    source: int = CONSTANT_UNIT,
    contexts: bool = False,
) -> bytes | None:
    """The form that suits; None if the words are stored better as they are."""
    effort, size = LEVELS[level], found.size
    if size > MAX_ELEMENTS:
        return None
    if dtype.name in MANTISSA and size >= LEAST_HALVES:
        made = encode_float16(foretold, found, MANTISSA[dtype.name])
        if made is not None:
            return made
    planes = (deltas.zigzag_bits(foretold, found) + 7) // 8
    if size >= MIN_ELEMENTS and planes > FEW_PLANES and dtype.name == "float32":
        best = best_shift(foretold, found, source, told)
        if best is not None and best[1] < guess_steps(foretold, found):
            made = encode_grid(foretold, found, source, best[0], contexts, told, effort)
            if made is not None:
                return made
    return encode_steps(foretold, found, planes, effort)


def decode_residual(data: Bytes, foretold: Array, dtype: DType, told: SecondMoments) -> Array:
    """The words. `data` is hostile, and has at least one byte."""
    if data[0] <= foretold.itemsize:
        return decode_steps(data, foretold)
    if data[0] == GRID:
        return decode_grid(data, foretold, told)
    if data[0] in (BUCKETS, RARE, CHANGES, TABLES) and dtype.name in MANTISSA:
        return decode_float16(data, foretold, MANTISSA[dtype.name])
    raise CodecError(f"a part has no residuals of form {data[0]}")


def encode_steps(foretold: Array, found: Array, planes: int, effort: CodingLevel) -> bytes | None:
    """Planes of zigzagged differences: as many as any needs."""
    size = found.size
    writer = ChunkWriter(planes, planes, size * found.itemsize)
    parts = [writer.plane(size, effort) for _ in range(planes)]
    if planes:
        deltas.split_zigzags(foretold, found, parts)
    made = writer.data(size * found.itemsize + 1)
    return None if made is None else bytes(made)


def decode_steps(data: Bytes, foretold: Array) -> Array:
    parts = read(data, [foretold.size] * data[0])
    if not parts:
        return foretold.copy()
    out = np.empty_like(foretold)
    deltas.merge_zigzags(foretold, parts, out)
    return out


def guess_steps(foretold: Array, found: Array) -> float:
    """Bytes for each value that planes of differences would take, told from a sample."""
    foretold, found = sampled(foretold), sampled(found)
    parts = [np.empty(found.size, np.uint8) for _ in range(found.itemsize)]
    deltas.split_zigzags(foretold, found, parts)
    return sum(map(lossless.estimate_bits, parts)) / 8
