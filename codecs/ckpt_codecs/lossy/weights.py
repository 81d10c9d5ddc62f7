"""The change of the weights: scaled by the second moments' factors, turned into the basis, quantised."""

from dataclasses import dataclass, field

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import lattice, quantise
from ckpt_codecs.lossy.basis import Basis
from ckpt_codecs.lossy.factors import Factors
from ckpt_codecs.lossy.quantise import Quantiser

MOST_RANK = 255
_QUIET = 128
"""Levels below the largest from which rows and columns are scaled alike. Where nothing was seen of a token, its second
moments are zero: the steps there must not be as long as that."""
_CAP = np.float32(16)
_TINY = np.float32(1e-30)


@dataclass(frozen=True)
class Way:
    """From weights to numbers that are worth quantising, and back, by what both sides know.

    `before`: the weights, None in an anchor; `last`: how they moved before, if that is known. All n x m of float32.
    `factors`: of the second moments; their eighth root scales, since weights of large gradients matter more.
    """

    matrix: tuple[int, int]
    before: Array | None
    factors: Factors | None
    last: Array | None
    _bases: dict[int, Basis | None] = field(default_factory=dict, compare=False)

    def forward(self, true: Array) -> Array:
        """The change, scaled."""
        return self._scaled(true if self.before is None else true - self.before, 1)

    def encode(self, values: Array, quantiser: Quantiser, rank: int) -> bytes:
        """What `forward` gave: whether it is scaled, the rank of the basis, the numbers."""
        basis = self._basis(rank)
        data = quantiser.encode(values if basis is None else basis.into(values))
        return bytes([self.factors is not None, 0 if basis is None else rank]) + data

    def back(self, data: bytes) -> Array:
        """The weights again. Raises `CodecError` for what is damaged."""
        if len(data) < 2 or data[0] > 1 or (data[0] and self.factors is None):
            raise CodecError("weights of a lossy chunk are damaged")
        values = quantise.decode(data[2:], self.matrix)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if data[1]:
                basis = self._basis(data[1])
                if basis is None:
                    raise CodecError("weights of a lossy chunk need the moments before them")
                values = basis.back(values)
            if data[0]:
                values = self._scaled(values, -1)
            return values if self.before is None else self.before + values

    def _scaled(self, values: Array, sign: int) -> Array:
        if self.factors is None:
            return values
        rows, columns = (
            lattice.power(sign * np.maximum(level, level.max(initial=lattice.LOW) - _QUIET))
            for level in (self.factors.rows, self.factors.columns)
        )
        return (values * rows[:, None]) * columns

    def _basis(self, rank: int) -> Basis | None:
        if not rank or self.last is None or self.before is None:
            return None
        if rank not in self._bases:
            self._bases[rank] = Basis.along(self._scaled(self.last, 1), rank)
        return self._bases[rank]


def direction(first: Array, second: Array | None) -> Array:
    """How weights moved that have these moments: the first over the root of the second, within bounds; n x m."""
    if second is None:
        largest = np.abs(first).max(initial=0)
        return first if largest < _CAP else first * (_CAP / largest)
    safe = np.where(second > _TINY, second, np.float32(1))
    with np.errstate(over="ignore"):
        moved = np.clip(first / np.sqrt(safe), -_CAP, _CAP)
    return np.where(second > _TINY, moved, np.float32(0))
