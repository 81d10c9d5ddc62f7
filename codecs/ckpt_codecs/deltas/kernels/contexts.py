# mypy: ignore-errors
"""Symbols put together by what is known beforehand of each, in their order, and back."""

import numpy as np
from numba import types

from ckpt_codecs.kernels.jit import BYTES, OUT, OUT64, WORDS16, kernel, part

I16, U16 = types.int16, types.uint16


@part
def _counts(contexts):
    """Two tables by turns, since one would wait for its own sums."""
    once, twice = np.zeros(256, np.uint64), np.zeros(256, np.uint64)
    for i in range(0, contexts.size & ~1, 2):
        once[contexts[i]] += types.uint64(1)
        twice[contexts[i + 1]] += types.uint64(1)
    if contexts.size & 1:
        once[contexts[contexts.size - 1]] += types.uint64(1)
    return once + twice


@part
def _starts(contexts):
    counts, at = _counts(contexts), types.uint64(0)
    for c in range(256):
        counts[c], at = at, at + counts[c]
    return counts


@kernel(types.void, BYTES, OUT64)
def count(contexts, counts):
    """How often each of 256 contexts occurs."""
    counts[:] = _counts(contexts)


@kernel(types.void, WORDS16, types.uint16, types.int16, types.int16, OUT)
def buckets(words, mantissa, least, most, out):
    for i in range(out.size):
        above = I16(I16(U16(words[i] & U16(0x7FFF)) >> mantissa) - least)
        above = I16(0) if above < I16(0) else above
        out[i] = types.uint8(above if above < most else most)


@kernel(types.void, BYTES, BYTES, OUT)
def gather(contexts, plane, out):
    places = _starts(contexts)
    for i in range(plane.size):
        c = contexts[i]
        out[places[c]] = plane[i]
        places[c] += types.uint64(1)


@kernel(types.void, BYTES, BYTES, OUT)
def scatter(contexts, plane, out):
    places = _starts(contexts)
    for i in range(plane.size):
        c = contexts[i]
        out[i] = plane[places[c]]
        places[c] += types.uint64(1)
