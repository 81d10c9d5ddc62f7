"""Buckets of 16-bit floats by the exponents of their predictions: smaller values change by more steps."""

from dataclasses import dataclass

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.deltas.unpredicted import sample_runs
from ckpt_codecs.native import deltas

MANTISSA_BITS = {"bfloat16": 7, "float16": 10}
"""The dtypes that have buckets, and the bits of their mantissas."""
COVERED = 0.995
"""The share of values in the buckets below the last one, or in it."""


@dataclass(frozen=True)
class ExponentBuckets:
    """One bucket for each of `count` exponents.

    Attributes:
        mantissa_bits: Those of the dtype.
        min_exponent: The exponent of the first bucket, which also has all smaller ones. The last has all larger ones.
    """

    mantissa_bits: int
    min_exponent: int
    count: int


def buckets_for(predicted: Array, mantissa_bits: int, max_count: int) -> ExponentBuckets:
    """Return the buckets that suit `predicted`, (n,) uint16, at most `max_count`."""
    exponents = (sample_runs(predicted) & np.uint16(0x7FFF)) >> np.uint16(mantissa_bits)
    cumulative = np.bincount(exponents).cumsum()
    highest = int(np.searchsorted(cumulative, COVERED * cumulative[-1])) if cumulative.size else 0
    return ExponentBuckets(mantissa_bits, max(highest - max_count + 1, 0), min(max_count, highest + 1))


def bucket_of(predicted: Array, buckets: ExponentBuckets) -> Array:
    """Return the bucket of each of `predicted`, (n,) uint16: (n,) uint8, this thread's buffer."""
    return deltas.exponent_buckets(predicted, buckets.mantissa_bits, buckets.min_exponent, buckets.count)
