"""The second moments of a parameter, which encoder and decoder use in addition to a prediction."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.deltas.format_ids import CONSTANT_UNIT, ROOT_BEFORE
from ckpt_codecs.native import deltas

MIN_UNIT, MAX_UNIT = 1, 254


@dataclass(frozen=True)
class SecondMoments:
    """The second moments before and after a step: functions that return `exp_avg_sq`, (n,) uint32, bits of float32.

    They are functions because decoding the second moments takes time, and few forms of residuals need them.
    """

    before: Callable[[], Array]
    after: Callable[[], Array]


def grid_units(source: int, shift: int, size: int, second_moments: SecondMoments) -> Array:
    """Return the biased exponent of the unit of each value's grid: (size,) uint8.

    `source`: CONSTANT_UNIT, ROOT_BEFORE or ROOT_AFTER. `shift`: octaves from the root to the unit, or the unit itself.
    """
    if source == CONSTANT_UNIT:
        return np.full(size, min(max(shift, MIN_UNIT), MAX_UNIT), np.uint8)
    second = second_moments.before() if source == ROOT_BEFORE else second_moments.after()
    return deltas.root_units(second, shift)
