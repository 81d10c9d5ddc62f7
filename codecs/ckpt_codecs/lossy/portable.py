"""The arithmetic of the kernels without Numba: the same sums in the same order, the same bits, slowly."""

from ckpt_codecs.lossy.portable_coder import note, read, write
from ckpt_codecs.lossy.portable_matrices import reflect, subtract, times, turned_times
from ckpt_codecs.lossy.portable_moments import (
    direction,
    from_levels,
    is_finite,
    level_sums,
    momentum,
    residuals,
    sums,
    told,
)
from ckpt_codecs.lossy.portable_weights import back, forward, from_codes, quantise

__all__ = [
    "back",
    "direction",
    "forward",
    "from_codes",
    "from_levels",
    "is_finite",
    "level_sums",
    "momentum",
    "note",
    "quantise",
    "read",
    "reflect",
    "residuals",
    "subtract",
    "sums",
    "times",
    "told",
    "turned_times",
    "write",
]
