"""A rotated basis that both sides know: the subspace in which the weights moved before.

From one interval to the next, the change of a weight matrix keeps to much the same few directions, and the first
moment over the root of the second is about the last change. So its leading singular vectors come first in the new
basis, where most of the next change's energy gathers in `rank` rows and `rank` columns; Householder reflections
complete them to all of the space. Float32, every sum in a fixed order: the same bits on every machine.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.native import lossy

LEAST_RANK = 4
SAMPLE = 4
"""Every so-manieth row tells where the rows lie."""
F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Reflections:
    """The orthogonal matrix `1 - w t w.T`, as n x k, k x k (Schreiber and Van Loan, 1989)."""

    w: Array
    t: Array

    @classmethod
    def of(cls, y: Array) -> "Reflections":
        """That whose first columns span those of `y`, n x k: a QR decomposition."""
        w, t = np.empty(y.shape, F32), np.empty((y.shape[1], y.shape[1]), F32)
        lossy.decompose_qr(y, w, t)
        return cls(w, t)

    def first(self) -> Array:
        """Its first k columns."""
        n, k = self.w.shape
        made = np.zeros((n, k), F32)
        np.fill_diagonal(made, 1)
        lossy.subtract_product(made, self.w, _product(self.t, np.ascontiguousarray(self.w[:k].T)))
        return made

    def left(self, z: Array, turned: bool = False) -> None:
        """Replace `z` by this matrix, or by its transpose, times `z`."""
        t = np.ascontiguousarray(self.t.T) if turned else self.t
        seen = np.empty((z.shape[1], self.w.shape[1]), F32)
        lossy.multiply_transposed(z, self.w, seen)
        lossy.subtract_product(z, self.w, _product(t, np.ascontiguousarray(seen.T)))

    def right(self, z: Array, turned: bool = False) -> None:
        """Replace `z` by `z` times this matrix, or its transpose."""
        t = np.ascontiguousarray(self.t.T) if turned else self.t
        lossy.subtract_product(z, _product(_product(z, self.w), t), np.ascontiguousarray(self.w.T))


@dataclass(frozen=True)
class Basis:
    """Rows and columns turned."""

    rows: Reflections
    columns: Reflections

    @classmethod
    def along(cls, change: Array, rank: int) -> "Basis | None":
        """Of a change of n x m weights that is not all zero; None if it is too small."""
        n, m = change.shape
        rank = min(rank, n // 2, m // 2)
        if rank < LEAST_RANK:
            return None
        sample = np.ascontiguousarray(change[::SAMPLE])
        once = _product(sample, _signs(m, rank))
        columns = Reflections.of(_turned_product(sample, once))
        return cls(Reflections.of(_product(change, columns.first())), columns)

    def into(self, values: Array) -> None:
        """Replace values by their coefficients."""
        self.rows.left(values, turned=True)
        self.columns.right(values)

    def back(self, coefficients: Array) -> None:
        """Replace coefficients by the values that they are of."""
        self.columns.right(coefficients, turned=True)
        self.rows.left(coefficients)


def _product(a: Array, x: Array) -> Array:
    out = np.empty((a.shape[0], x.shape[1]), F32)
    lossy.multiply(np.ascontiguousarray(a), x, out)
    return out


def _turned_product(a: Array, x: Array) -> Array:
    out = np.empty((a.shape[1], x.shape[1]), F32)
    lossy.multiply_transposed(a, x, out)
    return out


@lru_cache(4)
def _signs(n: int, k: int) -> Array:
    """Plus and minus one, as a hash of the place says (the finalizer of MurmurHash3)."""
    h = np.arange(1, n * k + 1, dtype=np.uint32)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return np.where(h & np.uint32(1), np.float32(-1), np.float32(1)).reshape(n, k)
