"""Blobs computed from blobs of several checkpoints: their mean, or the value that all of them have."""

import math
from dataclasses import dataclass

import numpy as np

from ckpt.combine.rounding import round_once
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, slabs
from ckpt_formats.core.tensor import Array, Blob, read
from ckpt_formats.core.text import printable

_BLOCK = 1 << 16
"""Elements that are computed at once. Larger arrays leave the core's cache, and are mapped and unmapped each time."""


@dataclass(frozen=True)
class AverageBlob(Blob):
    """The weighted mean of blobs of one shape: float64 arithmetic from left to right, rounded once to `dtype`.

    The blobs may differ in element type. Complex numbers are pairs of real ones.
    """

    blobs: tuple[Blob, ...]
    weights: tuple[float, ...]
    dtype: DType

    @property
    def shape(self) -> Shape:
        return self.blobs[0].shape

    def parts(self) -> tuple[Blob, ...]:
        return self.blobs

    def crop(self, box: Box) -> "AverageBlob":
        return AverageBlob(tuple(blob.crop(box) for blob in self.blobs), self.weights, self.dtype)

    def read_into(self, out: Array, reader: Reader) -> None:
        total_weight = math.fsum(self.weights)
        for box in slabs(self.shape, _BLOCK):
            total: Array | None = None
            for blob, weight in zip(self.blobs, self.weights, strict=True):
                with np.errstate(all="ignore"):
                    term = _as_float64(read(blob.crop(box), reader), self.dtype.kind == "c")
                    term *= weight
                    total = term if total is None else np.add(total, term, out=total)
            assert total is not None
            with np.errstate(all="ignore"):
                total /= total_weight
            out[box.index] = _from_float64(total, self.dtype).reshape(box.shape)


def _as_float64(values: Array, pairs: bool) -> Array:
    """The values as a new vector of float64; of complex numbers (`pairs`), real and imaginary parts in turn."""
    if pairs:
        return values.astype(np.complex128).reshape(-1).view(np.float64)
    return values.reshape(-1).astype(np.float64)


def _from_float64(values: Array, dtype: DType) -> Array:
    """A vector of float64 rounded once to `dtype`; for a complex type, pairs of real numbers become one."""
    if dtype.kind != "c":
        return round_once(values, dtype)
    return round_once(values, np.dtype(f"float{4 * dtype.itemsize}")).view(dtype)


@dataclass(frozen=True)
class EqualBlob(Blob):
    """Values that are equal in several blobs of one shape and element type; or the largest of each, for counters.

    Reading raises `UnsupportedError` if the values differ.
    """

    blobs: tuple[Blob, ...]
    name: str
    largest: bool = False

    @property
    def shape(self) -> Shape:
        return self.blobs[0].shape

    @property
    def dtype(self) -> DType:
        return self.blobs[0].dtype

    def parts(self) -> tuple[Blob, ...]:
        return self.blobs

    def crop(self, box: Box) -> "EqualBlob":
        return EqualBlob(tuple(blob.crop(box) for blob in self.blobs), self.name, self.largest)

    def read_into(self, out: Array, reader: Reader) -> None:
        for box in slabs(self.shape, _BLOCK):
            result = read(self.blobs[0].crop(box), reader)
            for blob in self.blobs[1:]:
                values = read(blob.crop(box), reader)
                if self.largest:
                    np.maximum(result, values, out=result)
                elif values.tobytes() != result.tobytes():
                    raise UnsupportedError(
                        f"`{printable(self.name)}` holds {self.dtype.name} values which differ between the "
                        "checkpoints: they have no average",
                        hint="Leave the tensor out: `select(skip=...)`, or --skip.",
                    )
            out[box.index] = result
