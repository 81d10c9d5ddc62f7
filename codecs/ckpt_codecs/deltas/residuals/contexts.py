"""Symbols grouped by their contexts, so that each context has its own code."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.native import deltas
from ckpt_codecs.scratch import thread_buffer


def group_by_context(symbols: Array, contexts: Array, count: int) -> list[Array]:
    """Return the symbols of each of `count` contexts, in their order: (m,) uint8 each, in this thread's buffer.

    `symbols`, `contexts`: (n,) uint8.
    """
    grouped = thread_buffer("gathered", symbols.size)
    deltas.gather(contexts, symbols, grouped)
    return np.split(grouped, np.cumsum(deltas.count_contexts(contexts, count))[:-1])


def undo_grouping(groups: list[Array], contexts: Array) -> Array:
    """Return the symbols in their original order: (n,) uint8, this thread's buffer. `contexts`: (n,) uint8."""
    grouped, symbols = thread_buffer("gathered", contexts.size), thread_buffer("scattered", contexts.size)
    np.concatenate(groups, out=grouped)
    deltas.scatter(contexts, grouped, symbols)
    return symbols
