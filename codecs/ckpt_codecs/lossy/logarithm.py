"""The binary logarithm from operations that IEEE 754 rounds alike everywhere, so that every machine codes the same."""

import numpy as np

from ckpt_codecs.base import Array

_TWO_BY_LN2 = float.fromhex("0x1.71547652b82fep+1")
_ROOT_OF_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")


def log2(values: Array) -> Array:
    """Of float64, as `numpy.log2` to about 1e-15; exact of powers of two. Warns of nothing: of zero it is -inf.

    A value is 2^k * m with m from sqrt(1/2) to sqrt(2); log2(m) is 2 / ln(2) * atanh((m - 1) / (m + 1)), by its series
    up to the 21st power. The C library's own differs between platforms in the last bit.
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
        made: Array = exponents + _TWO_BY_LN2 * (s * total)
        return np.where(np.isfinite(values) & (values > 0), made, np.log2(values))
