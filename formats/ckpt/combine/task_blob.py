"""Task arithmetic: a base plus the weighted differences of models from it, all or some of whose elements are kept."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from ckpt.combine.average_blob import BLOCK, as_float64, round_once
from ckpt.combine.whole_tensor import (
    Once,
    Threshold,
    blocks,
    exact_sum,
    flat_indices,
    magnitudes,
    threshold_of_largest,
)
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, slabs
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, read

Rescale = Literal["none", "density", "l1"]
"""By what drawn differences are multiplied: 1, 1 / density, or what restores the sum of absolute values."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_TINY = 1e-7
"""Sums of absolute values below which nothing is rescaled, as in mergekit."""


@dataclass(frozen=True)
class FindThreshold:
    """Called with a reader, finds the threshold of the `count` elements which differ most from the base."""

    model: Blob
    base: Blob
    count: int

    def __call__(self, reader: Reader) -> Threshold:
        return threshold_of_largest(self.model, self.base, self.count, reader)


@dataclass(frozen=True)
class Largest:
    """Keeps the elements that differ most, as TIES does."""

    threshold: Once[Threshold]

    def factors(self, box: Box, shape: tuple[int, ...], model: Array, base: Array, reader: Reader) -> Array:
        """1 for elements that are kept, else 0. model, base: the block's values, (n,) float64. Returns (n,) float64."""
        threshold = self.threshold.get(reader)
        bits = magnitudes(model, base)
        selection = bits > threshold.least
        equal = bits == threshold.least
        if equal.any():
            selection |= equal & (flat_indices(box, shape) < threshold.end)
        return selection.astype(np.float64)


@dataclass(frozen=True)
class Drawn:
    """Keeps each element with the same probability, as DARE does, and multiplies what it keeps."""

    key: int
    density: float
    factor: "float | Once[float]"

    def factors(self, box: Box, shape: tuple[int, ...], model: Array, base: Array, reader: Reader) -> Array:
        """The factor for elements that are drawn, else 0: (n,) float64."""
        factor = self.factor.get(reader) if isinstance(self.factor, Once) else self.factor
        return drawn(self.key, self.density, flat_indices(box, shape)) * factor


@dataclass(frozen=True)
class FindFactor:
    """Called with a reader, finds what restores the sum of absolute differences after some are dropped."""

    model: Blob
    base: Blob
    key: int
    density: float

    def __call__(self, reader: Reader) -> float:
        before, after = [], []
        for box, (x, b) in blocks((self.model, self.base), reader):
            with np.errstate(all="ignore"):
                sizes = np.abs(x - b)
            before.append(float(np.add.reduce(sizes)))
            after.append(float(np.add.reduce(sizes[drawn(self.key, self.density, flat_indices(box, self.base.shape))])))
        whole, rest = exact_sum(before), exact_sum(after)
        return 1.0 if whole < _TINY or rest < _TINY else whole / rest


def drawing_key(seed: int, name: str, model: int) -> int:
    """The key from which the elements of a tensor are drawn: another one for each tensor, model and seed."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=f"{seed} {model}".encode()).digest()
    return int.from_bytes(digest, "little")


def drawn(key: int, density: float, indices: Array) -> Array:
    """Which elements are drawn: (n,) bool, each true with probability `density`.

    indices: (n,) uint64, positions in the tensor. An element's number is the output of SplitMix64 at its position
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), so it does not depend on the block
    in which it is computed.
    """
    with np.errstate(over="ignore"):
        z = (indices + np.uint64(1)) * _STEP
        z += np.uint64(key)
        for shift, factor in _MIX:
            z ^= z >> np.uint64(shift)
            z *= factor
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) < density * 2.0**53


@dataclass(frozen=True)
class TaskVector:
    """A model whose difference from the base is added."""

    model: Blob
    weight: float
    selection: Largest | Drawn | None = None
    """Which elements of the difference are kept; None: all."""


@dataclass(frozen=True)
class TaskBlob(BlockBlob):
    """A block of `base + scale * sum(weight * difference)`, in float64, rounded once to the type of the base.

    `elect`: where differences disagree in sign, only those count that have the sign of their weighted sum (TIES).
    `normalize`: the sum is divided by the sum of the weights that count.
    """

    base: Blob
    vectors: tuple[TaskVector, ...]
    scale: float
    elect: bool
    normalize: bool
    box: Box

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def parts(self) -> tuple[Blob, ...]:
        return tuple(blob.crop(self.box) for blob in (self.base, *(vector.model for vector in self.vectors)))

    def read_into(self, out: Array, reader: Reader) -> None:
        for inner in slabs(self.shape, BLOCK):
            box = inner.shift(self.box.start)
            base = as_float64(read(self.base.crop(box), reader), False)
            with np.errstate(all="ignore"):
                change = self._change(box, base, reader)
                change *= self.scale
                change += base
            out[inner.index] = round_once(change, self.dtype).reshape(inner.shape)

    def _change(self, box: Box, base: Array, reader: Reader) -> Array:
        """The sum of what is added to a block of the base, before the scale: (n,) float64."""
        weighted = []
        for vector in self.vectors:
            values = as_float64(read(vector.model.crop(box), reader), False)
            factors: Array | float = 1.0
            if vector.selection is not None:
                factors = vector.selection.factors(box, self.base.shape, values, base, reader)
            values -= base
            values *= factors
            values *= vector.weight
            weighted.append(values)
        if self.elect:
            return self._elected(weighted)
        total = _sum(weighted)
        divisor = sum(vector.weight for vector in self.vectors)
        return total / divisor if self.normalize and abs(divisor) >= _NO_DIVISOR else total

    def _elected(self, weighted: list[Array]) -> Array:
        sign = np.where(_sum(weighted) >= 0, 1.0, -1.0)
        total, divisor = np.zeros_like(sign), np.zeros_like(sign)
        for vector, values in zip(self.vectors, weighted, strict=True):
            agrees = np.sign(values) == sign
            total += np.where(agrees | np.isnan(values), values, 0.0)
            divisor += agrees * vector.weight
        if self.normalize:
            divisor[divisor == 0] = 1
            total /= divisor
        return total


_NO_DIVISOR = 1e-8
"""Weights with a smaller sum are not normalised, as in mergekit."""


def _sum(arrays: list[Array]) -> Array:
    total = arrays[0].copy()
    for one in arrays[1:]:
        total += one
    return total
