"""The kernels of gradients' codecs, as functions of arrays. `codecs/kernels/gradients.h` says what each does.

Words are the bits of float32, flat uint32. Arrays have no gaps.

Raises:
    CodecError: Arrays have other dtypes or sizes: a mistake of ckpt's own.
"""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.library import ADDRESS, FLOAT, INT64, address, bind

SIGNATURES = {
    "count_words": (INT64, ADDRESS, INT64),
    "split_sparse": (INT64, ADDRESS, INT64, INT64, *[ADDRESS, INT64] * 3),
    "merge_sparse": (INT64, ADDRESS, INT64, INT64, *[ADDRESS, INT64] * 3),
    "find_factor": (INT64, ADDRESS, INT64),
    "divide_by_factor": (INT64, ADDRESS, INT64, FLOAT, ADDRESS),
    "multiply_by_factor": (INT64, ADDRESS, INT64, FLOAT, ADDRESS),
    "quantise_blocks": (INT64, *[ADDRESS, INT64] * 2, ADDRESS),
    "restore_blocks": (INT64, *[ADDRESS, INT64] * 2, ADDRESS),
}
kernels = bind(SIGNATURES)

BLOCK = 512
"""Words that share a scale."""
LONG_GAP = 255
"""The byte of a gap that stands for as many, and no word yet."""
MOST_SHIFT = 24
"""The most bits of a gap that are no part of its byte."""

_UINT8, _UINT16, _UINT32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)


def count_words(words: Array) -> int:
    """How many words are not zero."""
    return int(kernels.count_words(address(words, _UINT32), words.size))


def lows_bytes(values: int, shift: int) -> int:
    """Bytes that the lowest bits of the gaps before so many values take."""
    return -(-values * shift // 8)


def split_sparse(words: Array, shift: int, gaps: Array, lows: Array, values: Array) -> int:
    """Split words into those that are not zero, to `values`, uint32, and the gaps before them.

    Of each gap the lowest `shift` bits go to `lows`, uint8, `lows_bytes` of them; the rest goes to `gaps`, uint8.
    `values`: as many as words that are not zero. `gaps`: as many, and words.size // 255. Returns how many of these.
    """
    return int(
        kernels.split_sparse(
            *(address(words, _UINT32), words.size, shift, address(gaps, _UINT8, writable=True), gaps.size),
            *(address(lows, _UINT8, writable=True), lows.size, address(values, _UINT32, writable=True), values.size),
        )
    )


def merge_sparse(gaps: Array, shift: int, lows: Array, values: Array, words: Array) -> bool:
    """The words again; False if gaps and values do not fit them."""
    failed = kernels.merge_sparse(
        *(address(gaps, _UINT8), gaps.size, shift, address(lows, _UINT8), lows.size),
        *(address(values, _UINT32), values.size, address(words, _UINT32, writable=True), words.size),
    )
    return not failed


def find_factor(words: Array) -> int:
    """The bits of the factor of which 64 of the words are multiples by bfloat16 numbers; 0 if there is none."""
    return int(kernels.find_factor(address(words, _UINT32), words.size))


def divide_by_factor(words: Array, factor: float, out: Array) -> bool:
    """Write the bfloat16 numbers, as uint16, of which the words are multiples; False if the words do not come back."""
    _check_sizes(words.size, out)
    return bool(
        kernels.divide_by_factor(address(words, _UINT32), words.size, factor, address(out, _UINT16, writable=True))
    )


def multiply_by_factor(values: Array, factor: float, words: Array) -> None:
    """Multiply bfloat16 numbers, as uint16."""
    _check_sizes(values.size, words)
    kernels.multiply_by_factor(address(values, _UINT16), values.size, factor, address(words, _UINT32, writable=True))


def quantise_blocks(words: Array, scales: Array, codes: Array) -> int:
    """Quantise blocks of 512 words to codes, uint8, with scales, uint32, one for each block.

    Returns how many blocks are to be stored as they are.
    """
    _check_sizes(words.size, codes)
    return int(
        kernels.quantise_blocks(
            *(address(words, _UINT32), words.size, address(scales, _UINT32, writable=True), scales.size),
            address(codes, _UINT8, writable=True),
        )
    )


def restore_blocks(codes: Array, scales: Array, words: Array) -> bool:
    """The words again, zeros in blocks that are stored; False if a scale is none."""
    _check_sizes(codes.size, words)
    failed = kernels.restore_blocks(
        *(address(codes, _UINT8), codes.size, address(scales, _UINT32), scales.size),
        address(words, _UINT32, writable=True),
    )
    return not failed


def _check_sizes(size: int, out: Array) -> None:
    if out.size != size:
        raise CodecError(f"{size} elements do not become {out.size}: this is a mistake of ckpt's own")
