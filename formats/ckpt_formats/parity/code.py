"""Reed-Solomon codes over GF(2^8): the matrix of parities, and the matrix that computes lost blocks from others.

The matrix is the one that ISA-L calls Cauchy (`gf_gen_cauchy1_matrix`), with the polynomial 0x11d: parity r is the sum
over data c of 1 / ((k + r) xor c) times block c. Every square part of a Cauchy matrix can be inverted, so any k of the
k + m blocks give all others (Blömer et al.: An XOR-based erasure-resilient coding scheme, 1995).
"""

from collections.abc import Sequence
from functools import cache
from typing import Annotated

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.native.parity import add_products
from ckpt_formats.core.arguments import Range

MAX_BLOCKS = 255
"""Blocks of data and of parity that one code has, at most."""

MAX_LOST = 32
"""How many domains users may want to lose."""
Parities = Annotated[int, Range(1, MAX_LOST)]
"""How many domains may be lost."""


def parity_matrix(data: int, parities: int) -> Array:
    """Return the factors of each parity: (parities, data) uint8. Both numbers together are at most `MAX_BLOCKS`."""
    rows = np.arange(data, data + parities, dtype=np.uint8)[:, None]
    return np.ascontiguousarray(_inverses()[rows ^ np.arange(data, dtype=np.uint8)])


def recovery_matrix(data: int, parities: int, present: Sequence[int], wanted: Sequence[int]) -> Array:
    """Return the factors by which `present` blocks give the `wanted` ones: (wanted, present) uint8.

    Blocks are numbered: data first, then parities. `present` has `data` of them, in ascending order.
    """
    generator = np.concatenate([np.eye(data, dtype=np.uint8), parity_matrix(data, parities)])
    known = [block for block in present if block < data]
    missing = sorted(set(range(data)) - set(known))
    rows = generator[[block for block in present if block >= data]]
    # A row of parity is the sum over known data and over lost data: what is lost follows from the difference.
    solved = inverse(rows[:, missing])
    of_missing = np.concatenate([multiply(solved, rows[:, known]), solved], axis=1)
    whole = np.zeros((data, data), np.uint8)
    whole[known, range(len(known))] = 1
    whole[missing] = of_missing
    return multiply(generator[list(wanted)], whole)


def solution(matrix: Array, column: int) -> Array | None:
    """Return the factors of rows whose sum is 1 in a column and 0 in all others: (rows,) uint8; None if there are none.

    `matrix`: (rows, columns) uint8. Unlike those of `parity_matrix`, its elements may be 0 anywhere.
    """
    rows, columns = matrix.shape
    both = np.concatenate([matrix, np.eye(rows, dtype=np.uint8)], axis=1)
    done = 0
    for at in range(columns):
        pivots = np.flatnonzero(both[done:, at])
        if not len(pivots):
            if at == column:
                return None
            continue
        _pivot(both, done, done + int(pivots[0]), at)
        if at == column:
            row = done
        done += 1
    own = both[row]
    return None if np.count_nonzero(own[:columns]) > 1 else np.ascontiguousarray(own[columns:])


def multiply(left: Array, right: Array) -> Array:
    """Return the product (n, m) of two matrices (n, k) and (k, m) over GF(2^8), all uint8."""
    product = np.zeros((left.shape[0], right.shape[1]), np.uint8)
    if left.size and right.size:
        add_products(np.ascontiguousarray(left), np.ascontiguousarray(right), product)
    return product


def inverse(matrix: Array) -> Array:
    """Return the inverse of a matrix (n, n) over GF(2^8), both uint8, by Gauss and Jordan. There must be one."""
    size = len(matrix)
    both = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        _pivot(both, column, column + int(np.flatnonzero(both[column:, column])[0]), column)
    return np.ascontiguousarray(both[:, size:])


def _pivot(matrix: Array, row: int, other: int, column: int) -> None:
    """Exchange two rows, then make the element of the first 1 in a column, and those of all others 0, in place."""
    matrix[[row, other]] = matrix[[other, row]]
    matrix[[row]] = multiply(_inverses()[matrix[[row], column]][:, None], matrix[[row]])
    factors = matrix[:, [column]].copy()
    factors[row] = 0
    matrix ^= multiply(factors, matrix[[row]])


@cache
def _inverses() -> Array:
    """The inverse of each element of GF(2^8): (256,) uint8; 0 for 0, which has none."""
    powers, element = [], 1
    for _ in range(255):
        powers.append(element)
        element = element << 1 ^ (0x11D if element & 0x80 else 0)
    inverses = np.zeros(256, np.uint8)
    for exponent, value in enumerate(powers):
        inverses[value] = powers[-exponent % 255]
    return inverses
