"""Streams of few symbols, or mostly of one: packed below the one bit a symbol that a Huffman code needs."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.engine import engine

PER_BYTE = {2: 8, 3: 5, **dict.fromkeys(range(4, 17), 2)}
"""How many digits to a base fit into a byte."""


def most_gaps(size: int) -> int:
    """How many gaps a plane of this size can have."""
    return size + size // 255


def pack(plane: Array, symbols: Array) -> Array:
    """Neighbours together in a byte, as digits to the base of how many symbols there are, the first one lowest."""
    base, many = symbols.size, PER_BYTE[symbols.size]
    packed = np.zeros(packed_size(plane.size, base), np.uint8)
    if many == 2:
        engine().pack2(plane, symbols, packed)
        return packed
    digit = np.zeros(256, np.uint8)
    digit[symbols] = np.arange(base)
    digits = np.zeros(packed.size * many, np.uint8)
    digits[: plane.size] = digit[plane]
    for i in range(many):
        packed += digits[i::many] * np.uint8(base**i)
    return packed


def unpack(packed: Array, symbols: Array, out: Array) -> None:
    base, many = symbols.size, PER_BYTE[symbols.size]
    if many == 2:
        engine().unpack2(packed, symbols, out)
        return
    rows = symbols[np.arange(256)[:, None] // base ** np.arange(many) % base]
    out[:] = rows[packed].reshape(-1)[: out.size]


def packed_size(size: int, base: int) -> int:
    return -(-size // PER_BYTE[base])
