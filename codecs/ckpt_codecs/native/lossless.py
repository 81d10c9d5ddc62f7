"""The kernels of the lossless codecs, as functions of arrays. `codecs/kernels/lossless.h` specifies them.

`words` are the bits of values: (n,) uint8, uint16, uint32 or uint64. Planes are (n,) uint8. Arrays have no gaps.
`max_ratio`: a plane is coded if its stream is smaller than this share of it. `sampled`: do not try to code a plane if a
sample of it predicts that its stream is larger.
"""

from collections.abc import Sequence

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.library import ADDRESS, DOUBLE, INT, INT64, UINT64, address, bind, scratch

_SCRATCH = (ADDRESS, INT64)
_BYTES = (ADDRESS, INT64)
SIGNATURES = {
    "lossless_scratch": (INT64, INT64, INT64, INT64),
    "write_planes": (INT64, INT, INT64, ADDRESS, INT64, DOUBLE, INT, *_BYTES, *_SCRATCH),
    "read_planes": (INT64, INT, INT64, *_BYTES, ADDRESS, INT64, *_SCRATCH),
    "write_residuals": (
        *(INT64, INT64, ADDRESS, INT64, INT64, ADDRESS, INT64),
        *(DOUBLE, INT, DOUBLE, *_BYTES, *_SCRATCH),
    ),
    "read_residuals": (INT64, INT64, *_BYTES, INT64, ADDRESS, INT64, ADDRESS, INT64, *_SCRATCH),
    "write_streams": (INT64, ADDRESS, ADDRESS, ADDRESS, INT64, *_BYTES, *_SCRATCH),
    "read_streams": (INT64, *_BYTES, ADDRESS, ADDRESS, ADDRESS, ADDRESS, INT64, *_BYTES, *_SCRATCH),
    "entropy_code": (INT64, *_BYTES, *_BYTES, *_SCRATCH),
    "estimate_bits": (DOUBLE, *_BYTES),
    "split_planes": (INT64, INT, INT64, ADDRESS, INT64, *_BYTES),
    "to_bfloat16": (INT64, ADDRESS, INT64, ADDRESS),
    "is_bfloat16_of": (INT64, ADDRESS, ADDRESS, INT64),
    "to_float16": (INT64, ADDRESS, INT64, ADDRESS),
    "from_float16": (INT64, ADDRESS, INT64, ADDRESS),
    "count_masked": (INT64, INT64, ADDRESS, INT64, UINT64, UINT64),
}
kernels = bind(SIGNATURES)

_UINT8, _UINT16, _UINT32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)
_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)


def write_planes(words: Array, floats: bool, max_ratio: float, sampled: bool, out: Array) -> int:
    """Write a chunk of planes to `out`, all but its first byte; return where it ends.

    `words`: (n,) uint8, uint16, uint32 or uint64. `floats`: the exponent has its own plane. `out`: (m,) uint8,
    m >= 1 + width * (5 + n).
    """
    width, size = words.itemsize, words.size
    return int(
        kernels.write_planes(
            *(floats, width, address(words, words.dtype), size, max_ratio, sampled),
            *(address(out, _UINT8, writable=True), out.size),
            *scratch(kernels.lossless_scratch(width, size, 0)),
        )
    )


def read_planes(source: Array, floats: bool, words: Array) -> bool:
    """Fill `words`, (n,) uint8 to uint64, from a chunk of planes, (m,) uint8; False if that is not possible."""
    width, size = words.itemsize, words.size
    failed = kernels.read_planes(
        *(floats, width, address(source, _UINT8), source.size),
        *(address(words, words.dtype, writable=True), size),
        *scratch(kernels.lossless_scratch(width, size, 0)),
    )
    return not failed


def write_residuals(
    words: Array, base: Array | None, columns: int, max_ratio: float, sampled: bool, row_max_ratio: float, out: Array
) -> int:
    """Write a chunk of residuals to `out`, all but its first byte; return where it ends, or 0 if it saves nothing.

    `words`, `base`: (n,) uint32 for float32, (n,) uint16 for bfloat16. `columns`: values per row. `row_max_ratio`: the
    max_ratio of the streams of row scales. `out`: (m,) uint8.
    """
    width, size = words.itemsize, words.size
    _check_base(base, words)
    return int(
        kernels.write_residuals(
            *(width, address(words, words.dtype), size, *_base(base), columns),
            *(max_ratio, sampled, row_max_ratio, address(out, _UINT8, writable=True), out.size),
            *scratch(kernels.lossless_scratch(width, size, columns)),
        )
    )


def read_residuals(source: Array, base: Array | None, columns: int, words: Array) -> bool:
    """Fill `words`, (n,) uint16 or uint32, from a chunk of residuals, (m,) uint8; False if that is not possible."""
    width, size = words.itemsize, words.size
    _check_base(base, words)
    failed = kernels.read_residuals(
        *(width, address(source, _UINT8), source.size, *_base(base), columns),
        *(address(words, words.dtype, writable=True), size),
        *scratch(kernels.lossless_scratch(width, size, columns)),
    )
    return not failed


def write_streams(sizes: Sequence[int], max_ratios: Sequence[float], sampled: Sequence[bool], out: Array) -> int:
    """Turn planes into streams in place, and write their directory to out[1:]; return where the last stream ends.

    `out`: (m,) uint8, has the planes, one after another, from 1 + 5 * len(sizes) on.
    """
    arguments = np.array(sizes, _INT64), np.array(max_ratios, _FLOAT64), np.array(sampled, _UINT8)
    return int(
        kernels.write_streams(
            *(
                address(arguments[0], _INT64),
                address(arguments[1], _FLOAT64),
                address(arguments[2], _UINT8),
                len(sizes),
            ),
            *(address(out, _UINT8, writable=True), out.size),
            *scratch(kernels.lossless_scratch(1, max(sizes, default=0), 0)),
        )
    )


def read_streams(
    source: Array, kinds: Sequence[int], starts: Sequence[int], sizes: Sequence[int], places: Sequence[int], out: Array
) -> int:
    """Fill planes from streams; return the index of the first that is damaged, or their number.

    Stream i is source[starts[i] : starts[i + 1]], and its plane out[places[i] : places[i] + sizes[i]]. The caller
    handles stored streams. `source`, `out`: (m,) uint8.
    """
    positions = [np.array(numbers, _INT64) for numbers in (starts, sizes, places)]
    kind_bytes = np.array(kinds, _UINT8)
    return int(
        kernels.read_streams(
            *(address(source, _UINT8), source.size, address(kind_bytes, _UINT8)),
            *(address(numbers, _INT64) for numbers in positions),
            *(len(sizes), address(out, _UINT8, writable=True), out.size),
            *scratch(kernels.lossless_scratch(1, max(sizes, default=0), 0)),
        )
    )


def entropy_code(plane: Array, out: Array) -> int:
    """Code a plane, (n,) uint8, into `out`, (n,) uint8, if that makes it smaller.

    Return the number of bytes: 0 if the plane should be stored, 1 if it is constant, else those of a Huffman code.
    """
    return int(
        kernels.entropy_code(
            *(address(plane, _UINT8), plane.size, address(out, _UINT8, writable=True), out.size),
            *scratch(kernels.lossless_scratch(1, plane.size, 0)),
        )
    )


def estimate_bits(plane: Array) -> float:
    """Return the bits per symbol of a plane, (n,) uint8, estimated from a sample; negative if it is too small."""
    return float(kernels.estimate_bits(address(plane, _UINT8), plane.size))


def split_planes(words: Array, floats: bool) -> Array:
    """Return the planes of words, (width, n) uint8. `floats`: the exponent has its own plane, the last.

    `words`: (n,) uint8, uint16, uint32 or uint64.
    """
    planes = np.empty((words.itemsize, words.size), _UINT8)
    kernels.split_planes(
        *(floats, words.itemsize, address(words, words.dtype), words.size),
        *(address(planes, _UINT8, writable=True), planes.size),
    )
    return planes


def to_bfloat16(words: Array, out: Array) -> None:
    """Round float32 to bfloat16, ties to even. Only the sign of a NaN remains.

    `words`: (n,) uint32, the bits of float32. `out`: (n,) uint16, the bits of bfloat16.
    """
    _check_sizes(words, out)
    kernels.to_bfloat16(address(words, _UINT32), words.size, address(out, _UINT16, writable=True))


def to_float16(words: Array, out: Array) -> None:
    """Round float32 to float16, ties to even. Only the sign of a NaN remains.

    `words`: (n,) uint32, the bits of float32. `out`: (n,) uint16, the bits of float16.
    """
    _check_sizes(words, out)
    kernels.to_float16(address(words, _UINT32), words.size, address(out, _UINT16, writable=True))


def from_float16(numbers: Array, out: Array) -> None:
    """Write float16 as float32. Only the sign of a NaN remains.

    `numbers`: (n,) uint16, the bits of float16. `out`: (n,) uint32, the bits of float32.
    """
    _check_sizes(numbers, out)
    kernels.from_float16(address(numbers, _UINT16), numbers.size, address(out, _UINT32, writable=True))


def is_bfloat16_of(words: Array, rounded: Array) -> bool:
    """Tell if `rounded`, (n,) uint16, are the bits of `words`, (n,) uint32, rounded to bfloat16, without NaNs."""
    _check_sizes(words, rounded)
    return bool(kernels.is_bfloat16_of(address(words, _UINT32), address(rounded, _UINT16), words.size))


def count_masked(words: Array, mask: int, value: int) -> int:
    """Count the words, (n,) uint8, uint16, uint32 or uint64, that have the bits of `value` where `mask` has ones."""
    return int(kernels.count_masked(words.itemsize, address(words, words.dtype), words.size, mask, value))


def _base(base: Array | None) -> tuple[int, int | None]:
    return (0, None) if base is None else (base.itemsize, address(base, base.dtype))


def _check_base(base: Array | None, words: Array) -> None:
    if base is not None and base.size != words.size:
        raise CodecError(f"{base.size} values are no base of {words.size}: this is a bug in ckpt")


def _check_sizes(words: Array, rounded: Array) -> None:
    if words.size != rounded.size:
        raise CodecError(f"{words.size} values do not round to {rounded.size}: this is a bug in ckpt")
