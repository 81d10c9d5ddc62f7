"""Buckets of halves, told apart by the exponents of what foretells them: small values go many steps."""

from dataclasses import dataclass

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.deltas.unpredicted import sampled
from ckpt_codecs.native import deltas

MANTISSA = {"bfloat16": 7, "float16": 10}
"""The types that have buckets, and the bits of their mantissas."""
HIGHEST = 0.995
"""The share of values that lie below the last bucket, or in it."""


@dataclass(frozen=True)
class ExponentBuckets:
    mantissa: int
    least: int
    """The exponent of the first bucket; smaller ones fall into it too."""
    many: int


def buckets_for(foretold: Array, mantissa: int, most: int) -> ExponentBuckets:
    """The buckets that suit, at most so many."""
    exponents = (sampled(foretold) & np.uint16(0x7FFF)) >> np.uint16(mantissa)
    ends = np.bincount(exponents).cumsum()
    highest = int(np.searchsorted(ends, HIGHEST * ends[-1])) if ends.size else 0
    return ExponentBuckets(mantissa, max(highest - most + 1, 0), min(most, highest + 1))


def bucket_of(foretold: Array, span: ExponentBuckets) -> Array:
    """The bucket of each value: this thread's scratch."""
    return deltas.exponent_buckets(foretold, span.mantissa, span.least, span.many)
