"""The twins of `float16.c`: float32 rounded to float16, and float16 as float32, all as the bits."""

import numpy as np

from ckpt_codecs.base import Array


def to_float16(words: Array, out: Array) -> None:
    values = words.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = values.astype(np.float16).view(np.uint16)
    nan = np.isnan(values)
    out[nan] = words[nan] >> 16 & 0x8000 | 0x7E00


def from_float16(numbers: Array, out: Array) -> None:
    values = numbers.view(np.float16)
    with np.errstate(invalid="ignore"):
        out[:] = values.astype(np.float32).view(np.uint32)
    nan = np.isnan(values)
    out[nan] = (numbers[nan].astype(np.uint32) & 0x8000) << 16 | 0x7FC00000
