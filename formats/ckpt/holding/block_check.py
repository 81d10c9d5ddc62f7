"""A checksum of a block to which products are added: it is updated with each, and never computed from the block.

So what flips in the block shows, also before the next product is added. It is linear over GF(2^8), as a parity is: a
block has 128 rows of 8 KiB, and the checksum is the sum of `n + 1` times row n. A row is damaged without a difference
only if another one is damaged at the same place in a way that cancels it.
"""

from itertools import pairwise

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.native.parity import add_products
from ckpt_formats.parity.code import multiply

BLOCK_NBYTES = 1 << 20
CHECK_NBYTES = 1 << 13
_FACTORS = np.arange(1, BLOCK_NBYTES // CHECK_NBYTES + 1, dtype=np.uint8)[None]
"""Of each row."""


def add_to_check(check: Array, factor: int, values: Array, start: int) -> None:
    """Add `factor` times some bytes of a block, (n,) uint8 from byte `start` on, to its checksum (8192,) uint8."""
    stop = start + len(values)
    first, last = -(-start // CHECK_NBYTES) * CHECK_NBYTES, stop // CHECK_NBYTES * CHECK_NBYTES
    factors = multiply(np.array([[factor]], np.uint8), _FACTORS)
    cuts = [start, stop] if first > last else sorted({start, first, last, stop})
    for low, high in pairwise(cuts):
        rows = range(low // CHECK_NBYTES, (high - 1) // CHECK_NBYTES + 1)
        part = np.ascontiguousarray(values[low - start : high - start]).reshape(len(rows), -1)
        place = low % CHECK_NBYTES
        of_rows = np.ascontiguousarray(factors[:, rows.start : rows.stop])
        add_products(of_rows, part, check[None, place : place + part.shape[1]])


def is_as_added(block: Array, check: Array) -> bool:
    """Whether a block (2**20,) uint8 is the sum of what was added to it, by its checksum."""
    return bool((multiply(_FACTORS, block.reshape(-1, CHECK_NBYTES))[0] == check).all())
