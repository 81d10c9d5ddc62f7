"""The change of the weights: scaled by the second moments' factors, turned into the basis, quantised."""

from dataclasses import dataclass, field

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import log_levels as lattice
from ckpt_codecs.lossy import quantizer as quantise
from ckpt_codecs.lossy.basis import Basis
from ckpt_codecs.lossy.factors import Factors
from ckpt_codecs.lossy.quantizer import Quantizer
from ckpt_codecs.native import lossy
from ckpt_codecs.scratch import thread_buffer

MOST_RANK = 255
MOST_DIRECTION = 16.0
"""The bound of the direction of the last change."""
_QUIET = 128
"""Levels below the largest from which rows and columns are scaled alike. Where nothing was seen of a token, its second
moments are zero: the steps there must not be as long as that."""
Scales = tuple[Array, Array]
"""What rows and columns are multiplied with."""


@dataclass(frozen=True)
class PreviousMoments:
    """The moments before: how weights moved that have these. n x m of float32."""

    first: Array
    second: Array | None

    def direction(self, scales: Scales) -> Array | None:
        """The first over the root of the second, within bounds, scaled; None if it is nowhere."""
        made = _room("direction", self.first.shape)
        if self.second is not None:
            return made if lossy.update_direction(self.first, self.second, *scales, made) else None
        largest, cap = np.abs(self.first).max(initial=0), np.float32(MOST_DIRECTION)
        bounded = self.first if largest < cap else self.first * (cap / largest)
        return made if lossy.scale_change(bounded, None, *scales, made) > 0 else None


@dataclass(frozen=True)
class WeightTransform:
    """From weights to numbers that are worth quantising, and back, by what both sides know.

    `before`: the weights, None in an anchor; `last`: how they moved before, if that is known. All n x m of float32.
    `factors`: of the second moments; their eighth root scales, since weights of large gradients matter more.
    """

    matrix: tuple[int, int]
    before: Array | None
    factors: Factors | None
    last: PreviousMoments | None
    _bases: dict[int, Basis | None] = field(default_factory=dict, compare=False)
    _known_scales: dict[int, Scales] = field(default_factory=dict, compare=False)

    def forward(self, true: Array) -> tuple[Array, float]:
        """The change, scaled, in memory that is lent until the next call; the sum of its squares."""
        made = _room("forward", self.matrix)
        return made, lossy.scale_change(true, self.before, *self._scales(1), made)

    def into(self, values: Array, rank: int) -> tuple[Array, int]:
        """What `forward` gave, turned into the basis, and the basis' rank: 0 if there is none."""
        basis = self._basis(rank)
        if basis is None:
            return values, 0
        basis.into(values)
        return values, rank

    def encode(self, turned: tuple[Array, int], quantiser: Quantizer) -> bytes:
        """What `into` gave: whether it is scaled, the rank of the basis, the numbers."""
        values, rank = turned
        return bytes([self.factors is not None, rank]) + quantiser.encode(values)

    def back(self, data: bytes, out: Array) -> Array:
        """The weights again, in `out`. Raises `CodecError` for what is damaged."""
        if len(data) < 2 or data[0] > 1 or (data[0] and self.factors is None):
            raise CodecError("weights of a lossy chunk are damaged")
        values = quantise.decode(data[2:], _room("back", self.matrix))
        if data[1]:
            basis = self._basis(data[1])
            if basis is None:
                raise CodecError("weights of a lossy chunk need the moments before them")
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                basis.back(values)
        scales = self._scales(-1) if data[0] else _ones(self.matrix)
        lossy.unscale_change(values, *scales, self.before, out)
        return out

    def _scales(self, sign: int) -> Scales:
        if self.factors is None:
            return _ones(self.matrix)
        if sign not in self._known_scales:
            rows, columns = (
                lattice.power(sign * np.maximum(level, level.max(initial=lattice.LOW) - _QUIET))
                for level in (self.factors.rows, self.factors.columns)
            )
            self._known_scales[sign] = rows, columns
        return self._known_scales[sign]

    def _basis(self, rank: int) -> Basis | None:
        if not rank or self.last is None or self.before is None:
            return None
        if rank not in self._bases:
            along = self.last.direction(self._scales(1))
            self._bases[rank] = None if along is None else Basis.along(along, rank)
        return self._bases[rank]


def _room(name: str, shape: tuple[int, ...]) -> Array:
    count = shape[0] * shape[1]
    return thread_buffer(name, 4 * count).view(np.float32).reshape(shape)


def _ones(shape: tuple[int, int]) -> Scales:
    return np.ones(shape[0], np.float32), np.ones(shape[1], np.float32)
