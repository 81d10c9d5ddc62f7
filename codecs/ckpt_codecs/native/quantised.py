"""The kernels of quantised weights, as functions of arrays. `codecs/kernels/quantised.h` states what each computes.

Arrays are C-contiguous; output arrays are filled in place.

Raises:
    CodecError: An array has another dtype or size, which is a bug in ckpt.
"""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.library import ADDRESS, INT64, address, bind

SIGNATURES = {
    "scale_codes": (INT64, ADDRESS, *[INT64] * 2, *[ADDRESS] * 2, *[INT64] * 5, ADDRESS),
    "scale_nibbles": (INT64, ADDRESS, INT64, INT64, ADDRESS, ADDRESS, *[INT64] * 2, ADDRESS),
    "scale_integers": (INT64, ADDRESS, *[INT64] * 4, ADDRESS, INT64, ADDRESS),
    "unpack_words": (INT64, ADDRESS, *[INT64] * 3, ADDRESS, *[INT64] * 2, ADDRESS),
    "scale_columns": (INT64, ADDRESS, *[INT64] * 2, *[ADDRESS] * 3, INT64, ADDRESS),
    "encode_mxfp4": (INT64, ADDRESS, INT64, ADDRESS, ADDRESS),
}
kernels = bind(SIGNATURES)

_UINT8, _UINT32, _INT32, _FLOAT32 = (np.dtype(kind) for kind in (np.uint8, np.uint32, np.int32, np.float32))


def scale_codes(
    codes: Array, table: Array, scales: Array, skipped: tuple[int, int], block: tuple[int, int], out: Array
) -> None:
    """Fill `out`, (n, m) float32, with table[code] * scale.

    `codes`: (n, m) uint8; `table`: (256,) float32; `scales`: (r, c) float32, of each block; `block`: its rows and
    columns; `skipped`: how many of the first block's rows and columns are before the codes.
    """
    _check_sizes(out.size, codes.size, table.size == 256)
    rows, columns = codes.shape
    kernels.scale_codes(
        *(address(codes, _UINT8), rows, columns, address(table, _FLOAT32), address(scales, _FLOAT32), scales.size),
        *(skipped[0], block[0], skipped[1], block[1], address(out, _FLOAT32, writable=True)),
    )


def scale_nibbles(packed: Array, high_first: bool, table: Array, scales: Array, block: int, out: Array) -> None:
    """Fill `out`, (2 * n,) float32, with table[half byte] * scale.

    `packed`: (n,) uint8; `table`: (16,) float32; `scales`: (ceil(2 * n / block),) float32, of each `block` values.
    """
    _check_sizes(out.size, 2 * packed.size, table.size == 16)
    kernels.scale_nibbles(
        *(address(packed, _UINT8), packed.size, int(high_first), address(table, _FLOAT32)),
        *(address(scales, _FLOAT32), scales.size, block, address(out, _FLOAT32, writable=True)),
    )


def scale_integers(blocks: Array, offset: int, scales: Array, out: Array) -> None:
    """Fill `out`, (n, k) float32, with integer * scale.

    `blocks`: (n, stride) uint8, in which k signed integers of a byte begin at `offset`; `scales`: (n,) float32.
    """
    count, stride = blocks.shape
    _check_sizes(len(out), count, scales.size == count)
    kernels.scale_integers(
        *(address(blocks, _UINT8), blocks.size, stride, offset, out.shape[1]),
        *(address(scales, _FLOAT32), count, address(out, _FLOAT32, writable=True)),
    )


def unpack_words(words: Array, bits: int, shifts: Array, down: bool, out: Array) -> None:
    """Fill `out` with the integers of `bits` bits in words, number k of a word from bit shifts[k] on.

    `words`: (n, m) uint32; `shifts`: (k,) uint8; `out`: uint8, (n * k, m) if `down`, else (n, m * k).
    """
    rows, columns = words.shape
    _check_sizes(out.size, words.size * shifts.size, True)
    kernels.unpack_words(
        *(address(words, _UINT32), rows, columns, bits, address(shifts, _UINT8), shifts.size, int(down)),
        address(out, _UINT8, writable=True),
    )


def scale_columns(codes: Array, groups: Array, zeros: Array, scales: Array, out: Array) -> bool:
    """Fill `out`, (m, n) float32, with (code - zero) * scale. Returns False if there is a group that is not there.

    `codes`: (n, m) uint8; `groups`: (n,) int32, the row of `zeros` and `scales`, (g, m) float32, for each row of codes.
    """
    rows, columns = codes.shape
    _check_sizes(out.size, codes.size, groups.size == rows and zeros.shape == scales.shape)
    _check_sizes(scales.size, len(scales) * columns, True)
    wrong = kernels.scale_columns(
        *(address(codes, _UINT8), rows, columns, address(groups, _INT32), address(zeros, _FLOAT32)),
        *(address(scales, _FLOAT32), scales.size, address(out, _FLOAT32, writable=True)),
    )
    return not wrong


def encode_mxfp4(values: Array, codes: Array, scales: Array) -> None:
    """Fill `codes`, (n, 16) uint8, and `scales`, (n,) uint8, with MXFP4 of `values`: (n, 32) float32, finite."""
    _check_sizes(codes.size, values.size // 2, values.size == 32 * scales.size)
    kernels.encode_mxfp4(
        *(address(values, _FLOAT32), scales.size, address(codes, _UINT8, writable=True)),
        address(scales, _UINT8, writable=True),
    )


def _check_sizes(size: int, wanted: int, fits: bool) -> None:
    if size != wanted or not fits:
        raise CodecError(f"{size} elements are not {wanted}, or a table does not fit: this is a bug in ckpt")
