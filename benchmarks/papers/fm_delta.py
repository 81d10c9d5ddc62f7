"""FM-Delta (Ning et al., NeurIPS 2024): lossless. Floats as integers in the order of their values, subtracted.

Known: the mapping, the subtraction, the class of a difference (its sign and the length of its magnitude) by an entropy
coder, the bits below the highest as they are. The paper's range coder adapts; here each tensor has one table. Its own
code has no licence: nothing is taken from it.
"""

from __future__ import annotations

import numpy as np

from papers.coding import Array, decode_symbols, encode_symbols, frame, pack_bits, unframe, unpack_bits


def encode(after: Array, before: Array) -> bytes:
    """A tensor of 2- or 4-byte floats against the same at an earlier step."""
    change = _ordered(after) - _ordered(before)
    size = np.abs(change).astype(np.uint64)
    length = _lengths(size)
    parts = [encode_symbols(((length << 1) | (change < 0)).astype(np.uint8))]
    parts += (pack_bits(size[length == bits + 1], bits) for bits in range(1, int(length.max(initial=0))))
    return frame(*parts)


def decode(data: bytes, before: Array) -> Array:
    symbols, *rest = unframe(data)
    classes = decode_symbols(symbols)
    length, negative = classes >> 1, classes & 1
    size = (length > 0).astype(np.int64)
    for bits, packed in enumerate(rest, 1):
        here = length == bits + 1
        low = unpack_bits(packed, bits, int(here.sum())) if bits <= 32 else 0
        size[here] = (1 << bits) | np.asarray(low, np.int64)
    ordered = _ordered(before) + np.where(negative, -size, size)
    return _unordered(ordered, before.dtype).reshape(before.shape)


def _ordered(values: Array) -> Array:
    """Integers in the order of the floats, -0.0 right below 0.0: (n,) int64."""
    bits = values.dtype.itemsize * 8
    words = values.reshape(-1).view(f"u{bits // 8}").astype(np.int64)
    top = 1 << (bits - 1)
    return np.where(words >= top, top - 1 - (words - top), words + top)


def _unordered(ordered: Array, dtype: np.dtype[np.float32]) -> Array:
    bits = dtype.itemsize * 8
    top = 1 << (bits - 1)
    words = np.where(ordered < top, top - 1 - ordered + top, ordered - top)
    return words.astype(f"u{bits // 8}").view(dtype)


def _lengths(size: Array) -> Array:
    """Bits of each number up to 2^33: (n,) int64."""
    exponents = np.frexp(size.astype(np.float64))[1]  # exact below 2^53
    return np.where(size > 0, exponents, 0).astype(np.int64)
