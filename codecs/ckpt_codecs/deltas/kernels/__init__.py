"""What delta codecs are made of, compiled. Importing it compiles it, or loads it from Numba's cache."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.deltas import portable
from ckpt_codecs.deltas.kernels import arithmetic, changes, contexts, grid, rows, seconds, seldom, tables
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
    out = borrow("which", words.size)
    contexts.buckets(words, mantissa, least, many - 1, out)
    return out


def count(which: Array, many: int) -> Array:
    counts = np.empty(256, np.uint64)
    contexts.count(which, counts)
    return counts.view(np.int64)[: max(many, int(which.max(initial=0)) + 1)]


def read_seldom(data: Array, counts: Array, kinds: Array, plane: Array) -> bool:
    return bool(seldom.read_seldom(data, counts, kinds, plane))


def find_changes(
    foretold: Array, found: Array, which: Array, contexts: int, many: int
) -> tuple[Array, Array, Array, Array, Array]:
    buckets, gaps, steps = np.empty(many, np.uint8), np.empty(many, np.int64), np.empty(many, np.uint16)
    sizes, tails = np.empty(contexts, np.int64), np.empty(contexts, np.int64)
    changes.find(foretold, found, which, buckets, gaps, steps, sizes, tails)
    return buckets, gaps, steps, sizes, tails


def write_changes(
    buckets: Array, gaps: Array, steps: Array, sizes: Array, tails: Array, kinds: Array, out: Array
) -> int:
    following = np.empty(buckets.size, np.int64)
    return int(changes.write(buckets, gaps, steps, sizes, tails, kinds, following, out))


def read_changes(data: Array, foretold: Array, which: Array, sizes: Array, out: Array) -> bool:
    return bool(changes.read(data, foretold, which, sizes, out))


def tally_steps(foretold: Array, found: Array, which: Array, contexts: int) -> tuple[Array, Array, Array]:
    told, bits = borrow("told", 2 * found.size).view(np.uint16), borrow("bits", 2 * found.size + 16)
    counts = np.empty((contexts, tables.SYMBOLS), np.uint32)
    used = int(tables.tally(foretold, found, which, told, counts, bits)) + 7 >> 3
    bits[used : used + 8] = 0
    return told, counts, bits[: used + 8]


def write_steps(told: Array, weights: Array) -> tuple[Array, Array]:
    states, words = np.empty(tables.LANES, np.uint32), borrow("words", 2 * told.size + 2).view(np.uint16)
    return states, words[tables.write(told, weights, states, words) :]


def read_steps(
    foretold: Array, which: Array, weights: Array, states: Array, words: Array, bits: Array, out: Array
) -> bool:
    table, symbols = borrow("table", 4 * tables.WHOLE * len(weights)).view(np.uint32), borrow("symbols", out.size)
    used = int(tables.read(foretold, which, weights, states, words, bits, table, symbols, out))
    return used >= 0 and (used + 7 >> 3) + 8 == bits.size


def write_rows(plane: Array, columns: int, out: Array) -> int:
    return int(rows.write_rows(plane, columns, out))


def read_rows(data: Array, columns: int, plane: Array) -> bool:
    return bool(rows.read_rows(data, columns, plane))


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
