"""The kernels of gradient codecs, as functions of arrays. `codecs/kernels/gradients.h` states what each computes.

`words`: (n,) uint32, the bits of float32. Arrays are C-contiguous; output arrays are filled in place.

Raises:
    CodecError: An array has another dtype or size, which is a bug in ckpt.
"""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.library import ADDRESS, FLOAT, INT64, address, bind, scratch

SIGNATURES = {
    "count_words": (INT64, ADDRESS, INT64),
    "split_sparse": (INT64, ADDRESS, INT64, INT64, *[ADDRESS, INT64] * 3),
    "merge_sparse": (INT64, ADDRESS, INT64, INT64, *[ADDRESS, INT64] * 3),
    "find_factor": (INT64, ADDRESS, INT64),
    "divide_by_factor": (INT64, ADDRESS, INT64, FLOAT, ADDRESS),
    "multiply_by_factor": (INT64, ADDRESS, INT64, FLOAT, ADDRESS),
    "quantise_blocks": (INT64, *[ADDRESS, INT64] * 2, ADDRESS),
    "write_columns": (INT64, *[ADDRESS, INT64], INT64, INT64, *[ADDRESS, INT64] * 2),
    "read_columns": (INT64, *[ADDRESS, INT64], INT64, INT64, *[ADDRESS, INT64] * 2),
    "columns_scratch": (INT64, INT64, INT64),
    "restore_blocks": (INT64, *[ADDRESS, INT64] * 2, ADDRESS),
}
kernels = bind(SIGNATURES)

BLOCK = 512
"""The number of words that share a scale."""
LONG_GAP = 255
"""A byte with this value adds itself to a gap, which continues in the next byte."""
MAX_COLUMNS = 1 << 16
"""The maximum number of columns of `write_columns`."""
MAX_SHIFT = 24
"""The maximum number of low bits of a gap that are stored outside its byte."""

_UINT8, _UINT16, _UINT32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)


def count_words(words: Array) -> int:
    """The count of words that are not zero. `words`: (n,) uint32."""
    return int(kernels.count_words(address(words, _UINT32), words.size))


def lows_bytes(count: int, shift: int) -> int:
    """The bytes that the low bits of the gaps of `count` values take."""
    return -(-count * shift // 8)


def split_sparse(words: Array, shift: int, gaps: Array, lows: Array, values: Array) -> int:
    """Split words into the values that are not zero and the gaps before them; return the count of bytes in `gaps`.

    The lowest `shift` bits of each gap go to `lows`, the others to `gaps`. `words`: (n,) uint32; `values`: (k,) uint32,
    k words are not zero; `gaps`: (k + n // 255,) uint8; `lows`: (lows_bytes(k, shift),) uint8.
    """
    return int(
        kernels.split_sparse(
            *(address(words, _UINT32), words.size, shift, address(gaps, _UINT8, writable=True), gaps.size),
            *(address(lows, _UINT8, writable=True), lows.size, address(values, _UINT32, writable=True), values.size),
        )
    )


def merge_sparse(gaps: Array, shift: int, lows: Array, values: Array, words: Array) -> bool:
    """Fill `words`, (n,) uint32, from the arrays of `split_sparse`. Returns False if gaps and values do not fit n.

    `gaps`: uint8; `lows`: uint8; `values`: (k,) uint32.
    """
    failed = kernels.merge_sparse(
        *(address(gaps, _UINT8), gaps.size, shift, address(lows, _UINT8), lows.size),
        *(address(values, _UINT32), values.size, address(words, _UINT32, writable=True), words.size),
    )
    return not failed


def find_factor(words: Array) -> int:
    """The bits of a factor, as float32, so that 64 sampled words are bfloat16 numbers times it; 0 if there is none.

    `words`: (n,) uint32.
    """
    return int(kernels.find_factor(address(words, _UINT32), words.size))


def divide_by_factor(words: Array, factor: float, out: Array) -> bool:
    """Fill `out`, (n,) uint16, with the bfloat16 numbers that give the words, (n,) uint32, when multiplied by a factor.

    Returns False if the product of some number is not the exact word.
    """
    _check_sizes(words.size, out)
    return bool(
        kernels.divide_by_factor(address(words, _UINT32), words.size, factor, address(out, _UINT16, writable=True))
    )


def multiply_by_factor(numbers: Array, factor: float, words: Array) -> None:
    """Fill `words`, (n,) uint32, with bfloat16 numbers, (n,) uint16, times a factor."""
    _check_sizes(numbers.size, words)
    kernels.multiply_by_factor(address(numbers, _UINT16), numbers.size, factor, address(words, _UINT32, writable=True))


def quantise_blocks(words: Array, scales: Array, codes: Array) -> int:
    """Quantize blocks of 512 words; return the count of blocks that must be stored as they are.

    `words`: (n,) uint32; `scales`: (ceil(n / 512),) uint32, the bits of float32; `codes`: (n,) uint8.
    """
    _check_sizes(words.size, codes)
    return int(
        kernels.quantise_blocks(
            *(address(words, _UINT32), words.size, address(scales, _UINT32, writable=True), scales.size),
            address(codes, _UINT8, writable=True),
        )
    )


def write_columns(codes: Array, columns: int, skipped: int, out: Array) -> int:
    """Write codes in four classes by row and column; return the count of bytes, or 0 if one stream would be smaller.

    `codes`: (n,) uint8, from `skipped` elements after the beginning of a row on; 0 <= skipped < columns <= n;
    `out`: (m,) uint8, m >= n + 36 + ceil(columns / 2) + ceil((n // columns + 2) / 2).
    """
    return int(
        kernels.write_columns(
            *(address(codes, _UINT8), codes.size, columns, skipped, address(out, _UINT8, writable=True), out.size),
            *scratch(kernels.columns_scratch(codes.size, columns)),
        )
    )


def read_columns(source: Array, columns: int, skipped: int, codes: Array) -> int:
    """Fill `codes`, (n,) uint8, from what `write_columns` wrote; return the count of bytes, or 0 if they are damaged.

    `source`: (m,) uint8, which may go on after them; 0 <= skipped < columns <= n, columns <= MAX_COLUMNS.
    """
    return int(
        kernels.read_columns(
            *(address(source, _UINT8), source.size, columns, skipped),
            *(address(codes, _UINT8, writable=True), codes.size),
            *scratch(kernels.columns_scratch(codes.size, columns)),
        )
    )


def restore_blocks(codes: Array, scales: Array, words: Array) -> bool:
    """Fill `words` from codes and scales, with zeros in blocks that are stored. Returns False if a scale is not valid.

    `codes`: (n,) uint8; `scales`: (ceil(n / 512),) uint32; `words`: (n,) uint32.
    """
    _check_sizes(codes.size, words)
    failed = kernels.restore_blocks(
        *(address(codes, _UINT8), codes.size, address(scales, _UINT32), scales.size),
        address(words, _UINT32, writable=True),
    )
    return not failed


def _check_sizes(size: int, out: Array) -> None:
    if out.size != size:
        raise CodecError(f"{size} elements do not become {out.size}: this is a bug in ckpt")
