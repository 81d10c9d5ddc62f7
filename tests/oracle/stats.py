"""The twins of `stats.c`."""

import numpy as np

from ckpt_codecs.base import Array

_PARTS, _BIAS = 16, 1023


def count_values(words: Array, counts: Array) -> None:
    """Increase counts[word], (256,) or (65536,) uint32, for each of `words`, (n,) uint8 or uint16."""
    counts += np.bincount(words, minlength=counts.size).astype(np.uint32)


def measure_floats(values: Array, index: int, sums: Array, extremes: Array, counts: Array, exponents: Array) -> None:
    """Add `values`, (n,) float32 or float64, to the figures of a tensor, in which the first one has this index."""
    finite = np.isfinite(values)
    counts += np.count_nonzero(np.isnan(values)), np.count_nonzero(np.isinf(values)), np.count_nonzero(values == 0)
    numbers = np.where(finite, values, 0).astype(np.float64)
    with np.errstate(over="ignore"):
        for i in np.flatnonzero(finite).tolist():
            part = (index + i) % _PARTS
            sums[0, part] += numbers[i]
            sums[1, part] += numbers[i] * numbers[i]
    chosen = numbers[finite]
    extremes[:] = min(extremes[0], *chosen, np.inf) + 0.0, max(extremes[1], *chosen, -np.inf) + 0.0
    _, exponent = np.frexp(np.abs(chosen[chosen != 0]))
    exponents += np.bincount(np.maximum(exponent - 1 + _BIAS, 0), minlength=exponents.size)
