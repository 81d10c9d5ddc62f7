"""The reversible transform of a weight change before quantization.

It scales the change by the second moments, then rotates it into the basis of the last change.
"""

from dataclasses import dataclass, field

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import log_levels
from ckpt_codecs.lossy.basis import Basis
from ckpt_codecs.lossy.factors import Factors
from ckpt_codecs.lossy.quantizer import Quantizer
from ckpt_codecs.lossy.quantizer import decode as decode_quantized
from ckpt_codecs.native import lossy
from ckpt_codecs.scratch import thread_buffer

MAX_RANK = 255
MAX_DIRECTION = 16.0
"""The bound of the elements of the last change's direction."""
_SCALED_LEVELS = 128
"""Levels below the largest from which all rows, or columns, have the same scale. The second moments of a token that
never occurs are zero: without this bound its steps would be far too long."""
Scales = tuple[Array, Array]
"""The factors of rows and of columns: (n,) and (m,) float32."""


@dataclass(frozen=True)
class PreviousMoments:
    """The moments of the step before: `first`, and `second` if there is one, both (n, m) float32."""

    first: Array
    second: Array | None

    def direction(self, scales: Scales) -> Array | None:
        """The first moment over the root of the second, clipped and scaled: (n, m) float32; None if it is all zero.

        Without second moments it is the first moment, scaled down to the bound. The array is valid until the next call
        in this thread.
        """
        direction = _buffer("direction", self.first.shape)
        if self.second is not None:
            return direction if lossy.update_direction(self.first, self.second, *scales, direction) else None
        largest, cap = np.abs(self.first).max(initial=0), np.float32(MAX_DIRECTION)
        bounded = self.first if largest < cap else self.first * (cap / largest)
        return direction if lossy.scale_change(bounded, None, *scales, direction) > 0 else None


@dataclass(frozen=True)
class WeightTransform:
    """The transform of the weights of one chunk, which encoder and decoder both compute.

    `matrix`: (n, m). `before`: the weights of the step before, (n, m) float32, None if the chunk has none.
    `factors`: those of the second moments. Their eighth root scales the change, because weights with large gradients
    matter more. `previous`: the moments of the step before, if they are known.
    """

    matrix: tuple[int, int]
    before: Array | None
    factors: Factors | None
    previous: PreviousMoments | None
    _bases: dict[int, Basis | None] = field(default_factory=dict, compare=False)
    _scales_by_sign: dict[int, Scales] = field(default_factory=dict, compare=False)

    def scale(self, true: Array) -> tuple[Array, float]:
        """The scaled change, (n, m) float32, and the sum of its squares. `true`: the weights, (n, m) float32.

        The array is valid until the next call in this thread.
        """
        change = _buffer("forward", self.matrix)
        return change, lossy.scale_change(true, self.before, *self._scales(1), change)

    def rotate(self, values: Array, rank: int) -> tuple[Array, int]:
        """Rotate the result of `scale` in place into the basis: the coefficients, (n, m) float32, and the rank.

        The rank is 0 if there is no basis.
        """
        basis = self._basis(rank)
        if basis is None:
            return values, 0
        basis.rotate(values)
        return values, rank

    def encode(self, rotated: tuple[Array, int], quantizer: Quantizer) -> bytes:
        """The bytes of the result of `rotate`: is it scaled, the rank of the basis, the quantized coefficients.

        `rotated`: the coefficients, (n, m) float32, and the rank.
        """
        values, rank = rotated
        return bytes([self.factors is not None, rank]) + quantizer.encode(values)

    def decode(self, data: bytes, out: Array) -> Array:
        """Decode weights into `out`, (n, m) float32, and return it. Raises `CodecError` if the data is damaged."""
        if len(data) < 2 or data[0] > 1 or (data[0] and self.factors is None):
            raise CodecError("weights of a lossy chunk are damaged")
        values = decode_quantized(data[2:], _buffer("back", self.matrix))
        if data[1]:
            basis = self._basis(data[1])
            if basis is None:
                raise CodecError("weights of a lossy chunk need the moments before them")
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                basis.rotate_back(values)
        scales = self._scales(-1) if data[0] else _ones(self.matrix)
        lossy.unscale_change(values, *scales, self.before, out)
        return out

    def _scales(self, sign: int) -> Scales:
        """The scales (`sign` is 1) or their inverses (-1)."""
        if self.factors is None:
            return _ones(self.matrix)
        if sign not in self._scales_by_sign:
            rows, columns = (
                log_levels.power(sign * np.maximum(level, level.max(initial=log_levels.LOW) - _SCALED_LEVELS))
                for level in (self.factors.rows, self.factors.columns)
            )
            self._scales_by_sign[sign] = rows, columns
        return self._scales_by_sign[sign]

    def _basis(self, rank: int) -> Basis | None:
        if not rank or self.previous is None or self.before is None:
            return None
        if rank not in self._bases:
            direction = self.previous.direction(self._scales(1))
            self._bases[rank] = None if direction is None else Basis.of_change(direction, rank)
        return self._bases[rank]


def _buffer(name: str, shape: tuple[int, ...]) -> Array:
    """A buffer of this thread, (n, m) float32, valid until the next call with this name."""
    count = shape[0] * shape[1]
    return thread_buffer(name, 4 * count).view(np.float32).reshape(shape)


def _ones(shape: tuple[int, int]) -> Scales:
    return np.ones(shape[0], np.float32), np.ones(shape[1], np.float32)
