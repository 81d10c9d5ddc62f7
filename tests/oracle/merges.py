"""Merges of models after their formulas: whole tensors, float64, one model after another, and no block.

SLERP: Shoemake, "Animating rotation with quaternion curves" (1985). Task arithmetic: arXiv 2212.04089.
TIES: arXiv 2306.01708. DARE: arXiv 2311.03099, its drop mask given. Where papers leave a choice (the cosine from which
on SLERP is linear, the sign of a sum of zero, the l1 rescaling), mergekit 0.1.5 makes it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def slerp(a: Any, b: Any, t: float) -> Any:
    """The point at `t` on the arc between two float64 arrays of one shape."""
    cosine = math.fsum((a * b).flat) / math.sqrt(math.fsum((a * a).flat)) / math.sqrt(math.fsum((b * b).flat))
    if abs(cosine) > 0.9995:
        return (1 - t) * a + t * b
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle) * a + math.sin(t * angle) / math.sin(angle) * b


def largest(difference: Any, density: float) -> Any:
    """A mask of the elements with the largest absolute values: (...) bool, of equal ones those that come first."""
    count = max(1, int(density * difference.size))
    order = np.argsort(-np.abs(difference.astype(np.float32)).reshape(-1), kind="stable")
    mask = np.zeros(difference.size, np.bool_)
    mask[order[:count]] = True
    return mask.reshape(difference.shape)


def merged(
    base: Any, differences: Sequence[Any], weights: Sequence[float], elect: bool, normalize: bool, scale: float = 1.0
) -> Any:
    """`base` plus the weighted sum of differences, all float64 arrays of one shape."""
    result = base.copy()
    for at in np.ndindex(base.shape):
        terms = [(w, w * d[at]) for w, d in zip(weights, differences, strict=True)]
        if elect:
            positive = sum(term for _, term in terms) >= 0
            terms = [(w, term) for w, term in terms if term != 0 and (term > 0) == positive]
        divisor = (sum(w for w, _ in terms) or 1.0) if normalize else 1.0
        result[at] += scale * (sum(term for _, term in terms) / divisor)
    return result
