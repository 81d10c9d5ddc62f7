"""The twins of `quantised.c`: codes, half bytes and integers, times the scales of their blocks."""

import numpy as np

from ckpt_codecs.base import Array


def scale_codes(
    codes: Array, table: Array, scales: Array, skipped: tuple[int, int], block: tuple[int, int], out: Array
) -> None:
    row, column = ((np.arange(n) + skip) // size for n, skip, size in zip(codes.shape, skipped, block, strict=True))
    with np.errstate(all="ignore"):
        out[:] = table[codes] * scales[row][:, column] if out.size else 0


def scale_nibbles(packed: Array, high_first: bool, table: Array, scales: Array, block: int, out: Array) -> None:
    low, high = packed & 15, packed >> 4
    pairs = np.stack([high, low] if high_first else [low, high], 1).reshape(-1)
    with np.errstate(all="ignore"):
        out[:] = table[pairs] * scales.repeat(block)[: pairs.size]


def unpack_words(words: Array, bits: int, shifts: Array, down: bool, out: Array) -> None:
    fields = words[..., None] >> shifts.astype(np.uint32) & ((1 << bits) - 1)
    out[:] = (fields.swapaxes(1, 2) if down else fields).reshape(out.shape)


def scale_columns(codes: Array, groups: Array, zeros: Array, scales: Array, out: Array) -> bool:
    if groups.size and codes.size and not (groups.min() >= 0 and groups.max() < len(scales)):
        return False
    with np.errstate(all="ignore"):
        out[:] = ((codes.astype(np.float32) - zeros[groups]) * scales[groups]).T if out.size else 0
    return True


def encode_mxfp4(values: Array, codes: Array, scales: Array) -> None:
    exponents = np.maximum(np.frexp(np.abs(values).max(1, initial=0))[1] - 3, -127)
    exponents[~values.any(1)] = -127
    sizes = np.minimum(np.abs(np.ldexp(values.astype(np.float64), -exponents[:, None])), 6)
    distances = np.abs(sizes[..., None] - np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]))
    nearest = distances.argmin(-1)  # the lower one of two at a tie
    upper = np.minimum(nearest + 1, 7)
    is_tie = np.take_along_axis(distances, upper[..., None], -1)[..., 0] == distances.min(-1)
    nearest = np.where(is_tie & (nearest % 2 == 1), upper, nearest) | np.signbit(values) << 3
    codes[:] = nearest[:, ::2] | nearest[:, 1::2] << 4
    scales[:] = exponents + 127


def scale_integers(blocks: Array, offset: int, scales: Array, out: Array) -> None:
    with np.errstate(all="ignore"):
        integers = blocks[:, offset : offset + out.shape[1]].view(np.int8).astype(np.float32)
        out[:] = integers * scales[:, None]
