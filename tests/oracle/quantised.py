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


def scale_integers(blocks: Array, offset: int, scales: Array, out: Array) -> None:
    with np.errstate(all="ignore"):
        integers = blocks[:, offset : offset + out.shape[1]].view(np.int8).astype(np.float32)
        out[:] = integers * scales[:, None]
