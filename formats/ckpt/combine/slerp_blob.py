"""Spherical interpolation between two tensors, each taken as one vector."""

import math
from dataclasses import dataclass

import numpy as np

from ckpt.combine.average_blob import AverageBlob
from ckpt.combine.whole_tensor import Once, blocks, exact_sum
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Array, Blob, BlockBlob

_PARALLEL = 0.9995
"""The cosine above which two vectors are interpolated linearly, as in mergekit: the sine in the divisor is small."""
_SHORT = 1e-8
"""Vectors up to this norm are not normalised, as in mergekit."""


@dataclass(frozen=True)
class SlerpFactors:
    """The factors of both vectors at `t`: it is called with a reader, and reads both tensors once."""

    first: Blob
    second: Blob
    t: float

    def __call__(self, reader: Reader) -> tuple[float, float]:
        squares: tuple[list[float], list[float], list[float]] = ([], [], [])
        with np.errstate(all="ignore"):
            for _, (a, b) in blocks((self.first, self.second), reader):
                for parts, product in zip(squares, (a * a, b * b, a * b), strict=True):
                    parts.append(float(np.add.reduce(product)))
        norm_a, norm_b = (math.sqrt(exact_sum(parts)) for parts in squares[:2])
        dot = exact_sum(squares[2])
        dot /= (norm_a if norm_a > _SHORT else 1.0) * (norm_b if norm_b > _SHORT else 1.0)
        if not abs(dot) <= _PARALLEL:  # so that NaN spreads by the linear way, too
            return 1 - self.t, self.t
        angle = math.acos(dot)
        return math.sin((1 - self.t) * angle) / math.sin(angle), math.sin(self.t * angle) / math.sin(angle)


@dataclass(frozen=True)
class SlerpBlob(BlockBlob):
    """A block of the interpolation: `sin((1-t)w)/sin(w) * a + sin(tw)/sin(w) * b`, where w is the angle between them.

    Computed in float64 and rounded once to `dtype`.
    """

    first: Blob
    second: Blob
    factors: Once[tuple[float, float]]
    dtype: DType
    box: Box

    def parts(self) -> tuple[Blob, ...]:
        return self.first.crop(self.box), self.second.crop(self.box)

    def read_into(self, out: Array, reader: Reader) -> None:
        AverageBlob(self.parts(), self.factors.get(reader), self.dtype, 1.0).read_into(out, reader)
