"""The compiled half of the arithmetic: `ckpt_codecs.lossy.portable` does the same without Numba, bit for bit."""

from ckpt_codecs.lossy.kernels_coder import note, write
from ckpt_codecs.lossy.kernels_decoder import read
from ckpt_codecs.lossy.kernels_matrices import reflect, subtract, times, turned_times
from ckpt_codecs.lossy.kernels_moments import (
    direction,
    from_levels,
    is_finite,
    level_sums,
    momentum,
    residuals,
    sums,
    told,
)
from ckpt_codecs.lossy.kernels_weights import back, forward, from_codes, quantise

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
