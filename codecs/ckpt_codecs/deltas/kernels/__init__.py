"""What delta codecs are made of, compiled. Importing it compiles it, or loads it from Numba's cache."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.deltas import portable
from ckpt_codecs.deltas.kernels import arithmetic, contexts, grid, seconds, seldom
from ckpt_codecs.deltas.kernels import steps as step_kernels
from ckpt_codecs.scratch import borrow

gather, scatter = contexts.gather, contexts.scatter
gradients, halves, first, second = arithmetic.gradients, arithmetic.halves, arithmetic.first, arithmetic.second
weights_torch, weights_divided = arithmetic.weights_torch, arithmetic.weights_divided
weights_cpu_adam, weights_apex = arithmetic.weights_cpu_adam, arithmetic.weights_apex
carried, descended, mixed, scaled = arithmetic.carried, arithmetic.descended, arithmetic.mixed, arithmetic.scaled
_WIDEST = {2: step_kernels.widest16, 4: step_kernels.widest32}


def widest_step(before: Array, after: Array) -> int:
    width = before.itemsize
    return int(_WIDEST[width](before, after)) if width in _WIDEST else portable.widest_step(before, after)


def steps(before: Array, after: Array, parts: list[Array]) -> None:
    found = step_kernels.APART.get((before.itemsize, len(parts)))
    if found is None:
        portable.steps(before, after, parts)
    else:
        found(before, after, *parts)


def stepped(before: Array, parts: list[Array], out: Array) -> None:
    found = step_kernels.TOGETHER.get((before.itemsize, len(parts)))
    if found is None:
        portable.stepped(before, parts, out)
    else:
        found(before, *parts, out)


def to_grid(foretold: Array, found: Array, units: Array) -> tuple[Array, Array, Array]:
    size = found.size
    symbols, depths, bits = borrow("symbols", size), borrow("depths", size), borrow("bits", 4 * size + 16)
    told = int(grid.to_grid(foretold, found, units, symbols, depths, bits))
    many, used = told >> 40, (told & (1 << 40) - 1) + 7 >> 3
    bits[used : used + 8] = 0
    return symbols, depths[:many], bits[: used + 8]


def from_grid(foretold: Array, units: Array, symbols: Array, depths: Array, bits: Array, out: Array) -> bool:
    return bool(grid.from_grid(foretold, units, symbols, depths, bits, borrow("lefts", out.size), out))


def buckets(words: Array, mantissa: int, least: int, many: int) -> Array:
    out = np.empty(words.size, np.uint8)
    contexts.buckets(words, mantissa, least, many - 1, out)
    return out


def count(which: Array, many: int) -> Array:
    counts = np.empty(256, np.uint64)
    contexts.count(which, counts)
    return counts.view(np.int64)[: max(many, int(which.max(initial=0)) + 1)]


def write_seldom(plane: Array, counts: Array, kinds: Array, out: Array) -> int:
    return int(seldom.write_seldom(plane, counts, kinds, out))


def read_seldom(data: Array, counts: Array, kinds: Array, plane: Array) -> bool:
    return bool(seldom.read_seldom(data, counts, kinds, plane))


def root_units(second: Array, shift: int) -> Array:
    out = np.empty(second.size, np.uint8)
    seconds.root_units(second, shift, out)
    return out


def growth_contexts(before: Array, after: Array, least: int, many: int) -> Array:
    out = np.empty(before.size, np.uint8)
    seconds.growth_contexts(before, after, least, many - 1, out)
    return out


def drifted(words: Array, rows: Array, columns: Array) -> Array:
    out = np.empty_like(words)
    seconds.drifted(words, rows, columns, out)
    return out
