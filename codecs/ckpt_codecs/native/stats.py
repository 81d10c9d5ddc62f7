"""The kernels of figures of values, as functions of arrays. `codecs/kernels/stats.h` states what each computes.

Arrays are C-contiguous; those of figures are increased in place.

Raises:
    CodecError: An array has another dtype or size, which is a bug in ckpt.
"""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.library import ADDRESS, INT64, address, bind

SIGNATURES = {
    "count_values": (INT64, INT64, ADDRESS, INT64, ADDRESS),
    "measure_floats": (INT64, INT64, ADDRESS, INT64, INT64, *[ADDRESS] * 4),
}
kernels = bind(SIGNATURES)

SUM_PARTS, EXPONENT_COUNT = 16, 2048
_MANY = 1 << 20
"""Bytes from which on it pays to add up a table of pairs."""
_UINT32, _INT64, _FLOAT64 = np.dtype(np.uint32), np.dtype(np.int64), np.dtype(np.float64)


def count_values(words: Array, counts: Array) -> None:
    """Increase counts[word] for each word. `words`: (n,) uint8 or uint16; `counts`: (256,) or (65536,) uint32."""
    _check_size(counts, 1 << 8 * words.itemsize)
    if words.itemsize == 1 and words.size >= _MANY:
        words = _count_pairs(words.reshape(-1), counts)
    kernels.count_values(
        words.itemsize, address(words, words.dtype), words.size, address(counts, _UINT32, writable=True)
    )


def _count_pairs(words: Array, counts: Array) -> Array:
    """Count bytes two at a time, which takes fewer increments. Returns what is left of (n,) uint8: at most one byte."""
    paired, pairs = words[: words.size & ~1], np.zeros((256, 256), _UINT32)
    kernels.count_values(2, address(paired, words.dtype), words.size // 2, address(pairs, _UINT32, writable=True))
    counts += pairs.sum(axis=0, dtype=_UINT32) + pairs.sum(axis=1, dtype=_UINT32)
    return words[paired.size :]


def measure_floats(values: Array, index: int, sums: Array, extremes: Array, counts: Array, exponents: Array) -> None:
    """Add values to figures of a tensor, in which the first one has this index.

    `values`: (n,) float32 or float64. `sums`: (2, 16) float64, parts of the sum of the finite values and of their
    squares; `extremes`: (2,) float64, the least and greatest of them; `counts`: (3,) int64, of NaN, infinite and zero;
    `exponents`: (2048,) int64, of the biased exponents that the other values have as float64.
    """
    _check_size(sums, 2 * SUM_PARTS)
    _check_size(extremes, 2)
    _check_size(counts, 3)
    _check_size(exponents, EXPONENT_COUNT)
    if values.dtype.kind != "f":
        raise CodecError(f"{values.dtype} is neither float32 nor float64: this is a bug in ckpt")
    kernels.measure_floats(
        *(values.itemsize, address(values, values.dtype), values.size, index),
        *(address(sums, _FLOAT64, writable=True), address(extremes, _FLOAT64, writable=True)),
        *(address(counts, _INT64, writable=True), address(exponents, _INT64, writable=True)),
    )


def _check_size(array: Array, size: int) -> None:
    if array.size != size:
        raise CodecError(f"{array.size} elements are not {size}: this is a bug in ckpt")
