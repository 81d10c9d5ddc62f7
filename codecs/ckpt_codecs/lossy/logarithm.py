"""The binary logarithm from operations that IEEE 754 rounds the same on every machine."""

import numpy as np

from ckpt_codecs.base import Array

_TWO_BY_LN2 = float.fromhex("0x1.71547652b82fep+1")
_ROOT_OF_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")


def log2(values: Array) -> Array:
    """The binary logarithm of each value. `values` and the result: float64, same shape.

    The error is about 1e-15, and powers of two are exact. The logarithm of zero is -inf, without a warning.

    A value is 2^k * m with m from sqrt(1/2) to sqrt(2); log2(m) is 2 / ln(2) * atanh((m - 1) / (m + 1)), by its series
    up to the 21st power. The function of the C library differs between platforms in the last bit.
    """
    mantissas, exponents = np.frexp(values)
    low = mantissas <= _ROOT_OF_HALF
    mantissas, exponents = np.where(low, 2 * mantissas, mantissas), np.where(low, exponents - 1, exponents)
    with np.errstate(invalid="ignore", divide="ignore"):
        s = (mantissas - 1) / (mantissas + 1)
        square = s * s
        total = np.full_like(s, 1 / 21)
        for odd in range(19, 0, -2):
            total = total * square + 1 / odd
        logarithms: Array = exponents + _TWO_BY_LN2 * (s * total)
        return np.where(np.isfinite(values) & (values > 0), logarithms, np.log2(values))
