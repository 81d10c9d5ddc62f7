"""Symbols put together by what is known beforehand of each, so that each context has a code of its own."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.native import deltas
from ckpt_codecs.scratch import thread_buffer


def together(symbols: Array, which: Array, many: int) -> list[Array]:
    """The symbols of each context, in their order: this thread's scratch."""
    gathered = thread_buffer("gathered", symbols.size)
    deltas.gather(which, symbols, gathered)
    return np.split(gathered, np.cumsum(deltas.count_contexts(which, many))[:-1])


def apart(groups: list[Array], which: Array) -> Array:
    """The symbols in their places again: this thread's scratch."""
    gathered, symbols = thread_buffer("gathered", which.size), thread_buffer("scattered", which.size)
    np.concatenate(groups, out=gathered)
    deltas.scatter(which, gathered, symbols)
    return symbols
