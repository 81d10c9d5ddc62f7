"""Residuals of float32 on a grid: how many units from the prediction, and the bits of the mantissa below a unit."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import ChunkWriter, read_chunk
from ckpt_codecs.chunk.streams import CodingLevel
from ckpt_codecs.deltas.format_ids import CONSTANT_UNIT, FLOAT32_GRID, GROWTH_CONTEXTS, ROOT_BEFORE, UNIT_SOURCES
from ckpt_codecs.deltas.residuals.second_moments import SecondMoments, grid_units
from ckpt_codecs.deltas.unpredicted import sample_runs
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas, lossless
from ckpt_codecs.scratch import thread_buffer

HEAD = Struct("<BBhBbII")
"""Form, source and shift of the units, whether there are contexts, the least context, numbers of depths and of bytes
of bits."""
USUAL_OCTAVES = 5
"""Octaves from the usual distance between value and prediction down to the unit that is tried first."""
FINER_OCTAVES, COARSER_OCTAVES = (6, 7), (3, 2)
"""Octaves that are tried next, as long as they are better."""
DEPTH_BITS = 2.5
"""Estimated bits of a depth."""
QUARTER_OCTAVE = 21
"""Bits of a float32 below a quarter of an octave."""
MAX_CONTEXT = 120
FIRST_CONTEXT_SHARE = 0.1
"""The share of values in the first context."""


def encode_grid(
    predicted: Array,
    actual: Array,
    source: int,
    shift: int,
    contexts: bool,
    second_moments: SecondMoments,
    level: CodingLevel,
) -> bytes | None:
    """Return residuals on a grid; None if they take more bytes than the values.

    `predicted`, `actual`: (n,) uint32, the bits of float32. `source`, `shift`: see `grid_units`.
    """
    size = actual.size
    symbols, depths, bits = deltas.to_grid(predicted, actual, grid_units(source, shift, size, second_moments))
    groups, least = [symbols], 0
    if contexts:
        least = _least_context(second_moments)
        which = deltas.growth_contexts(second_moments.before(), second_moments.after(), least, GROWTH_CONTEXTS)
        groups = _group_by_context(symbols, which, GROWTH_CONTEXTS)
    writer = ChunkWriter(FLOAT32_GRID, len(groups) + 2, size + depths.size + bits.size)
    for group in groups:
        writer.add(group, level, always_try=group.size > 64)
    writer.add(depths, level)
    writer.add(bits, level)
    chunk = writer.finish(size * actual.itemsize)
    head = HEAD.pack(FLOAT32_GRID, source, shift, contexts, least, depths.size, bits.size)
    return None if chunk is None else head + chunk


def decode_grid(data: Bytes, predicted: Array, second_moments: SecondMoments) -> Array:
    """Return the actual bits, (n,) uint32. `data`: untrusted bytes. `predicted`: (n,) uint32, the bits of float32.

    Raises:
        CodecError: The residuals are damaged, or `predicted` has another dtype.
    """
    if len(data) < HEAD.size or predicted.itemsize != 4:
        raise CodecError("residuals on a grid end in their head, or are not of float32")
    _, source, shift, contexts, least, depth_count, bits_nbytes = HEAD.unpack_from(data)
    size = predicted.size
    if source >= UNIT_SOURCES or contexts > 1 or depth_count > size or bits_nbytes > 4 * size + deltas.PADDING:
        raise CodecError("the head of residuals on a grid is damaged")
    units = grid_units(source, shift, size, second_moments)
    which = None
    if contexts:
        which = deltas.growth_contexts(second_moments.before(), second_moments.after(), least, GROWTH_CONTEXTS)
    counts = [size] if which is None else deltas.count_contexts(which, GROWTH_CONTEXTS).tolist()
    *groups, depths, bits = read_chunk(data[HEAD.size :], [*counts, depth_count, bits_nbytes], "grid")
    symbols = groups[0] if which is None else _undo_grouping(groups, which)
    actual = np.empty(size, np.uint32)
    if not deltas.from_grid(predicted, units, symbols, depths, bits, actual):
        raise CodecError("residuals on a grid are damaged")
    return actual


def best_shift(predicted: Array, actual: Array, source: int, second_moments: SecondMoments) -> tuple[int, float] | None:
    """Return the shift of the units that takes the fewest bytes for a sample, and how many these are per value.

    None if no value differs from its prediction by a finite number. `predicted`, `actual`: (n,) uint32, the bits of
    float32.
    """
    predicted, actual = sample_runs(predicted), sample_runs(actual)
    constant = source == CONSTANT_UNIT
    if constant:
        second = actual
    else:
        second = sample_runs(second_moments.before() if source == ROOT_BEFORE else second_moments.after())
    sampled_moments = SecondMoments(lambda: second, lambda: second)
    with np.errstate(all="ignore"):
        distances = np.abs(actual.view(np.float32) - predicted.view(np.float32))
    usable = np.isfinite(distances) & (distances > 0)
    if not usable.any():
        return None
    exponents = np.frexp(distances[usable])[1] + np.int32(126)
    if not constant:
        exponents -= grid_units(source, 0, actual.size, sampled_moments)[usable]
    median = _quantile(exponents, 0.5)

    def cost(finer: int) -> float:
        units = grid_units(source, median - finer, actual.size, sampled_moments)
        symbols, depths, bits = deltas.to_grid(predicted, actual, units)
        return actual.size * lossless.estimate_bits(symbols) + 8 * bits.size + DEPTH_BITS * depths.size

    best = cost(USUAL_OCTAVES), USUAL_OCTAVES
    for direction in (FINER_OCTAVES, COARSER_OCTAVES):
        start = best
        for finer in direction:
            candidate = cost(finer), finer
            if candidate >= best:
                break
            best = candidate
        if best != start:
            break
    return median - best[1], best[0] / 8 / actual.size


def _least_context(second_moments: SecondMoments) -> int:
    """Return the growth of second moments, in quarter octaves, that is the first context."""
    before, after = sample_runs(second_moments.before()), sample_runs(second_moments.after())
    growth = (after - before).view(np.int32) >> np.int32(QUARTER_OCTAVE)
    return min(max(_quantile(growth, FIRST_CONTEXT_SHARE), -MAX_CONTEXT), MAX_CONTEXT)


def _quantile(values: Array, share: float) -> int:
    """Return the value that has this share of all values below it."""
    index = int(share * values.size)
    return int(np.partition(values, index)[index])


def _group_by_context(symbols: Array, contexts: Array, count: int) -> list[Array]:
    """Return the symbols of each of `count` contexts, in their order: (m,) uint8 each, in this thread's buffer.

    `symbols`, `contexts`: (n,) uint8.
    """
    grouped = thread_buffer("gathered", symbols.size)
    deltas.gather(contexts, symbols, grouped)
    return np.split(grouped, np.cumsum(deltas.count_contexts(contexts, count))[:-1])


def _undo_grouping(groups: list[Array], contexts: Array) -> Array:
    """Return the symbols in their original order: (n,) uint8, this thread's buffer. `contexts`: (n,) uint8."""
    grouped, symbols = thread_buffer("gathered", contexts.size), thread_buffer("scattered", contexts.size)
    np.concatenate(groups, out=grouped)
    deltas.scatter(contexts, grouped, symbols)
    return symbols
