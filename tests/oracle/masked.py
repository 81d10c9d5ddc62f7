"""The twin of `masked.c`."""

import numpy as np

from ckpt_codecs.base import Array


def count_masked(words: Array, mask: int, value: int) -> int:
    """How many of the words, (n,) uint8, uint16, uint32 or uint64, have the bits of `value` under the mask."""
    return int(np.count_nonzero((words & words.dtype.type(mask)) == words.dtype.type(value)))
