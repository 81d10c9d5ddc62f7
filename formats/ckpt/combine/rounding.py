"""Round float64 values once, to any type of floats."""

import numpy as np

from ckpt_codecs import Rounded
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.tensor import Array

_DROPPED_BITS = np.uint64((1 << 29) - 1)
"""The bits of a float64 significand which float32 does not have."""


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
