"""The twin of `zigzag.c`: zigzagged differences of words, as planes of bytes and back."""

import numpy as np

from ckpt_codecs.base import Array


def zigzag_bits(before: Array, after: Array) -> int:
    return int(np.bitwise_or.reduce(zigzag(before, after))).bit_length() if before.size else 0


def split_zigzags(before: Array, after: Array, planes: list[Array]) -> None:
    columns = zigzag(before, after).view(np.uint8).reshape(before.size, before.itemsize)
    for i, plane in enumerate(planes):
        plane[:] = columns[:, i]


def merge_zigzags(before: Array, planes: list[Array], out: Array) -> None:
    columns = np.zeros((before.size, before.itemsize), np.uint8)
    for i, plane in enumerate(planes):
        columns[:, i] = plane
    word = columns.reshape(-1).view(before.dtype)
    one = before.dtype.type(1)
    out[:] = before + ((word >> one) ^ (~(word & one) + one))


def zigzag(before: Array, after: Array) -> Array:
    """Differences modulo the width, small ones of either sign as small numbers."""
    width = before.itemsize
    step = (after - before).view(f"i{width}")
    words: Array = ((step << 1) ^ (step >> (8 * width - 1))).view(f"u{width}")
    return words
