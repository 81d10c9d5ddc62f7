"""Numbers of some bits each, one after another, from the lowest bit of each byte up."""

import numpy as np

from ckpt_codecs.base import Array

PADDING = 8
"""Bytes of zeros after the bits, so that words of eight can be loaded."""


def pack(numbers: Array, widths: Array) -> Array:
    """The lowest `widths` bits of each number, at most 32, and the padding."""
    ends = np.cumsum(widths)
    total = int(ends[-1]) if ends.size else 0
    bits = np.zeros(8 * (-(-total // 8) + PADDING), np.uint8)
    starts = ends - widths
    for i in range(int(widths.max(initial=0))):
        longer = widths > i
        bits[starts[longer] + i] = numbers[longer] >> numbers.dtype.type(i) & numbers.dtype.type(1)
    return np.packbits(bits, bitorder="little")


def unpack(bits: Array, widths: Array) -> Array:
    """The numbers (int64). There are as many bits as they take, and the padding."""
    starts = np.cumsum(widths) - widths
    word = np.zeros(widths.size, np.uint64)
    for i in range(5):
        word |= bits[(starts >> 3) + i].astype(np.uint64) << np.uint64(8 * i)
    word >>= (starts & 7).astype(np.uint64)
    numbers: Array = (word & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))).astype(np.int64)
    return numbers
