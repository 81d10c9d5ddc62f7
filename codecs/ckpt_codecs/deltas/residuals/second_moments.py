"""What both sides know of a state beside its prediction: the second moments of its parameter."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.deltas.format_ids import CONSTANT_UNIT, ROOT_BEFORE
from ckpt_codecs.native import deltas

SECOND = "exp_avg_sq"
LEAST_UNIT, GREATEST_UNIT = 1, 254


@dataclass(frozen=True)
class SecondMoments:
    """The words of `exp_avg_sq`, asked for when they are needed."""

    before: Callable[[], Array]
    after: Callable[[], Array]


def grid_units(source: int, shift: int, size: int, told: SecondMoments) -> Array:
    """The exponent of the unit of each value's grid."""
    if source == CONSTANT_UNIT:
        return np.full(size, min(max(shift, LEAST_UNIT), GREATEST_UNIT), np.uint8)
    second = told.before() if source == ROOT_BEFORE else told.after()
    return deltas.root_units(second, shift)
