"""Residuals of floats on grids: how many units from the prediction, and the mantissa's bits below a unit."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import ChunkWriter, read
from ckpt_codecs.chunk.streams import CodingLevel
from ckpt_codecs.deltas.format_ids import CONSTANT_UNIT, GRID, GROWTH_CONTEXTS, ROOT_BEFORE, UNIT_SOURCES
from ckpt_codecs.deltas.residuals.contexts import apart, together
from ckpt_codecs.deltas.residuals.second_moments import SecondMoments, grid_units
from ckpt_codecs.deltas.unpredicted import sampled
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas, lossless

HEAD = Struct("<BBhBbII")
"""Source and shift of the units, whether there are contexts and the least of them, how many depths and bits."""
FINER, COARSER = (6, 7), (3, 2)
USUAL = 5
"""Octaves from how far values are from their predictions to the unit that is tried first, and then either way."""
DEPTH_BITS = 2.5
QUARTER_OCTAVE = 21
"""Bits of a float32 below a quarter of an octave."""
FARTHEST, FEW = 120, 0.1


def encode_grid(
    foretold: Array, found: Array, source: int, shift: int, contexts: bool, told: SecondMoments, effort: CodingLevel
) -> bytes | None:
    """A part on grids; None if it would be larger than the values."""
    size = found.size
    symbols, depths, bits = deltas.to_grid(foretold, found, grid_units(source, shift, size, told))
    groups, least = [symbols], 0
    if contexts:
        least = _least(told)
        which = deltas.growth_contexts(told.before(), told.after(), least, GROWTH_CONTEXTS)
        groups = together(symbols, which, GROWTH_CONTEXTS)
    writer = ChunkWriter(GRID, len(groups) + 2, size + depths.size + bits.size)
    for group in groups:
        writer.add(group, effort, sure=group.size > 64)
    writer.add(depths, effort)
    writer.add(bits, effort)
    made = writer.data(size * found.itemsize)
    head = HEAD.pack(GRID, source, shift, contexts, least, depths.size, bits.size)
    return None if made is None else head + made


def decode_grid(data: Bytes, foretold: Array, told: SecondMoments) -> Array:
    if len(data) < HEAD.size or foretold.itemsize != 4:
        raise CodecError("a part on a grid ends in its head, or is not of float32")
    _, source, shift, contexts, least, deep, used = HEAD.unpack_from(data)
    size = foretold.size
    if source >= UNIT_SOURCES or contexts > 1 or deep > size or used > 4 * size + deltas.PADDING:
        raise CodecError("the head of a part on a grid is damaged")
    scale = grid_units(source, shift, size, told)
    which = None
    if contexts:
        which = deltas.growth_contexts(told.before(), told.after(), least, GROWTH_CONTEXTS)
    counts = [size] if which is None else deltas.count_contexts(which, GROWTH_CONTEXTS).tolist()
    *groups, depths, bits = read(data[HEAD.size :], [*counts, deep, used], "grid")
    symbols = groups[0] if which is None else apart(groups, which)
    out = np.empty(size, np.uint32)
    if not deltas.from_grid(foretold, scale, symbols, depths, bits, out):
        raise CodecError("a part on a grid is damaged")
    return out


def best_shift(foretold: Array, found: Array, source: int, told: SecondMoments) -> tuple[int, float] | None:
    """The shift that makes least of a sample, and bytes for each value; None if there is nothing to tell it from."""
    foretold, found = sampled(foretold), sampled(found)
    constant = source == CONSTANT_UNIT
    second = found if constant else sampled(told.before() if source == ROOT_BEFORE else told.after())
    near = SecondMoments(lambda: second, lambda: second)
    with np.errstate(all="ignore"):
        apart_by = np.abs(found.view(np.float32) - foretold.view(np.float32))
    usual = np.isfinite(apart_by) & (apart_by > 0)
    if not usual.any():
        return None
    far = np.frexp(apart_by[usual])[1] + np.int32(126)
    if not constant:
        far -= grid_units(source, 0, found.size, near)[usual]
    middle = _at_share(far, 0.5)

    def cost(finer: int) -> float:
        symbols, depths, bits = deltas.to_grid(foretold, found, grid_units(source, middle - finer, found.size, near))
        return found.size * lossless.estimate_bits(symbols) + 8 * bits.size + DEPTH_BITS * depths.size

    best = cost(USUAL), USUAL
    for way in (FINER, COARSER):
        began = best
        for finer in way:
            now = cost(finer), finer
            if now >= best:
                break
            best = now
        if best != began:
            break
    return middle - best[1], best[0] / 8 / found.size


def _least(told: SecondMoments) -> int:
    """What few second moments have grown by less than, in quarter octaves."""
    grown = (sampled(told.after()) - sampled(told.before())).view(np.int32) >> np.int32(QUARTER_OCTAVE)
    return min(max(_at_share(grown, FEW), -FARTHEST), FARTHEST)


def _at_share(values: Array, share: float) -> int:
    """What such a share of them is less than."""
    place = int(share * values.size)
    return int(np.partition(values, place)[place])
