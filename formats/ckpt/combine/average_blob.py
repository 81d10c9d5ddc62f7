"""Blobs computed from blobs of several checkpoints: their mean, or the value that all of them have."""

from dataclasses import dataclass

import numpy as np

from ckpt_codecs import Rounded
from ckpt_formats.core.computed_blobs import CombinedBlob
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import slabs
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.core.text import printable

_DROPPED_BITS = np.uint64((1 << 29) - 1)
"""The bits of a float64 significand which float32 does not have."""
BLOCK = 1 << 16
"""Elements that are computed at once. Larger arrays leave the core's cache, and are mapped and unmapped each time."""


@dataclass(frozen=True)
class AverageBlob(CombinedBlob):
    """A weighted sum of blobs of one shape, divided: float64 arithmetic from left to right, rounded once to `dtype`.

    The blobs may differ in element type. Complex numbers are pairs of real ones.
    """

    weights: tuple[float, ...]
    dtype: DType
    divisor: float
    """The sum of the weights, for their mean; 1 for a sum."""

    def read_into(self, out: Array, reader: Reader) -> None:
        for box in slabs(self.shape, BLOCK):
            total: Array | None = None
            for blob, weight in zip(self.blobs, self.weights, strict=True):
                with np.errstate(all="ignore"):
                    term = as_float64(read(blob.crop(box), reader), self.dtype.kind == "c")
                    term *= weight
                    total = term if total is None else np.add(total, term, out=total)
            assert total is not None
            with np.errstate(all="ignore"):
                total /= self.divisor
            out[box.index] = from_float64(total, self.dtype).reshape(box.shape)


def as_float64(values: Array, pairs: bool) -> Array:
    """The values as a new vector, (n,) float64; of complex numbers (`pairs`), real and imaginary parts in turn."""
    if pairs:
        return values.astype(np.complex128).reshape(-1).view(np.float64)
    return values.reshape(-1).astype(np.float64)


def from_float64(values: Array, dtype: DType) -> Array:
    """A vector, (n,) float64, rounded once to `dtype`; for a complex type, pairs of real numbers become one."""
    if dtype.kind != "c":
        return round_once(values, dtype)
    return round_once(values, np.dtype(f"float{4 * dtype.itemsize}")).view(dtype)


@dataclass(frozen=True)
class EqualBlob(CombinedBlob):
    """Values that are equal in several blobs of one shape and element type; or the largest of each, for counters.

    Reading raises `UnsupportedError` if the values differ.
    """

    name: str
    largest: bool = False

    @property
    def dtype(self) -> DType:
        return self.blobs[0].dtype

    def read_into(self, out: Array, reader: Reader) -> None:
        for box in slabs(self.shape, BLOCK):
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


def round_once(values: Array, dtype: DType) -> Array:
    """Float64 values rounded to nearest, ties to even, to another float type. NaNs become positive and quiet.

    NumPy and ml_dtypes go from float64 to the short types by way of float32, which rounds twice. Here the step to
    float32 rounds to odd, after which the second rounding gives the right result: float32 has at least two bits more
    than each of the short types (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).

    values: float64, of any shape. Returns an array of `dtype`, of the same shape.
    """
    with np.errstate(all="ignore"):
        if np.isnan(values).any():
            values = np.where(np.isnan(values), np.float64(np.nan), values)
        if dtype.itemsize >= 4:
            return values.astype(dtype)
        return Rounded().decode(b"", values.shape, dtype, _round_to_odd(values))


def _round_to_odd(values: Array) -> Array:
    """Float64 values as float32: an inexact one becomes that of its two float32 neighbours whose last bit is 1.

    Values beyond the largest float32 become infinite, which the short types round alike.
    """
    bits = values.view(np.uint64)
    odd = bits & _DROPPED_BITS
    odd += _DROPPED_BITS  # carries into the last bit that stays if any dropped bit is 1
    odd |= bits
    odd &= ~_DROPPED_BITS
    result = odd.view(np.float64).astype(np.float32)
    tiny = np.abs(values) < 2.0**-126
    if tiny.any():  # float32 has fewer bits here: multiples of 2**-149
        scaled = values[tiny] * 2.0**149
        whole = np.trunc(scaled)
        is_even = (whole != scaled) & (whole % 2 == 0)
        result[tiny] = np.where(is_even, whole + np.copysign(1, scaled), whole) * 2.0**-149
    return result
