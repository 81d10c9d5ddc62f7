"""A rotated basis that encoder and decoder both compute: the subspace in which the weights changed before.

From one interval to the next, the change of a weight matrix stays mostly in the same few directions, and the first
moment over the root of the second approximates the last change. Its leading singular vectors therefore come first in
the new basis: most of the next change's energy is in `rank` rows and `rank` columns. Householder reflections complete
these vectors to a basis of the full space. All arithmetic is float32 with sums in a fixed order, so every machine
computes the same bits.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.native import lossy

MIN_RANK = 4
ROW_STRIDE = 4
"""One row of this many is sampled to find the columns' subspace."""
F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Reflections:
    """The orthogonal matrix `1 - w @ t @ w.T` (Schreiber and Van Loan, 1989). `w`: (n, k), `t`: (k, k), float32."""

    w: Array
    t: Array

    @classmethod
    def of(cls, y: Array) -> "Reflections":
        """The matrix whose first k columns span the columns of `y`, (n, k) float32: a QR decomposition."""
        w, t = np.empty(y.shape, F32), np.empty((y.shape[1], y.shape[1]), F32)
        lossy.decompose_qr(y, w, t)
        return cls(w, t)

    def first_columns(self) -> Array:
        """The first k columns of the matrix: (n, k) float32."""
        n, k = self.w.shape
        columns = np.zeros((n, k), F32)
        np.fill_diagonal(columns, 1)
        lossy.subtract_product(columns, self.w, _product(self.t, np.ascontiguousarray(self.w[:k].T)))
        return columns

    def multiply_left(self, z: Array, transposed: bool = False) -> None:
        """Replace `z`, (n, m) float32, by this matrix, or its transpose, times `z`."""
        t = np.ascontiguousarray(self.t.T) if transposed else self.t
        product = np.empty((z.shape[1], self.w.shape[1]), F32)
        lossy.multiply_transposed(z, self.w, product)
        lossy.subtract_product(z, self.w, _product(t, np.ascontiguousarray(product.T)))

    def multiply_right(self, z: Array, transposed: bool = False) -> None:
        """Replace `z`, (m, n) float32, by `z` times this matrix, or its transpose."""
        t = np.ascontiguousarray(self.t.T) if transposed else self.t
        lossy.subtract_product(z, _product(_product(z, self.w), t), np.ascontiguousarray(self.w.T))


@dataclass(frozen=True)
class Basis:
    """The rotations of rows and columns."""

    rows: Reflections
    columns: Reflections

    @classmethod
    def of_change(cls, change: Array, rank: int) -> "Basis | None":
        """The basis of a change of weights that is not all zero; None if the matrix is too small.

        `change`: (n, m) float32. The method is a randomized range finder (Halko, Martinsson and Tropp, 2011).
        """
        n, m = change.shape
        rank = min(rank, n // 2, m // 2)
        if rank < MIN_RANK:
            return None
        sample = np.ascontiguousarray(change[::ROW_STRIDE])
        projected = _product(sample, _signs(m, rank))
        columns = Reflections.of(_transposed_product(sample, projected))
        return cls(Reflections.of(_product(change, columns.first_columns())), columns)

    def rotate(self, values: Array) -> None:
        """Replace values, (n, m) float32, by their coefficients in this basis."""
        self.rows.multiply_left(values, transposed=True)
        self.columns.multiply_right(values)

    def rotate_back(self, coefficients: Array) -> None:
        """Replace coefficients, (n, m) float32, by their values."""
        self.columns.multiply_right(coefficients, transposed=True)
        self.rows.multiply_left(coefficients)


def _product(a: Array, x: Array) -> Array:
    out = np.empty((a.shape[0], x.shape[1]), F32)
    lossy.multiply(np.ascontiguousarray(a), x, out)
    return out


def _transposed_product(a: Array, x: Array) -> Array:
    out = np.empty((a.shape[1], x.shape[1]), F32)
    lossy.multiply_transposed(a, x, out)
    return out


@lru_cache(4)
def _signs(n: int, k: int) -> Array:
    """Plus and minus one by a hash of the index (steps of the finalizer of MurmurHash3): (n, k) float32."""
    h = np.arange(1, n * k + 1, dtype=np.uint32)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return np.where(h & np.uint32(1), np.float32(-1), np.float32(1)).reshape(n, k)
