"""Numbers of some bits each, one after another, from the lowest bit of each byte up."""

import numpy as np

from ckpt_codecs.base import Array

PADDING = 8
"""Bytes of zeros after the bits, so that words of eight can be loaded."""


def packed(raw: Array, many: Array) -> Array:
    """The lowest `many <= 32` bits of each number."""
    ends = np.cumsum(many)
    total = int(ends[-1]) if ends.size else 0
    bits = np.zeros(8 * (-(-total // 8) + PADDING), np.uint8)
    starts = ends - many
    for i in range(int(many.max(initial=0))):
        some = many > i
        bits[starts[some] + i] = raw[some] >> raw.dtype.type(i) & raw.dtype.type(1)
    return np.packbits(bits, bitorder="little")


def unpacked(bits: Array, many: Array) -> Array:
    """The numbers. There are as many bits as they take, and the padding."""
    starts = np.cumsum(many) - many
    word = np.zeros(many.size, np.uint64)
    for i in range(5):
        word |= bits[(starts >> 3) + i].astype(np.uint64) << np.uint64(8 * i)
    word >>= (starts & 7).astype(np.uint64)
    made: Array = (word & ((np.uint64(1) << many.astype(np.uint64)) - np.uint64(1))).astype(np.int64)
    return made
