"""The twin of `class_masks.c`: which words of 16-bit floats differ."""

import numpy as np

from ckpt_codecs.base import Array


def count_changed(before: Array, after: Array) -> int:
    return int(np.count_nonzero(before != after))
