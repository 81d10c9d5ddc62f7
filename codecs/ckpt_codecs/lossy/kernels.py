"""The compiled half of the arithmetic: `ckpt_codecs.lossy.portable` does the same without Numba, bit for bit."""

from ckpt_codecs.lossy.kernels_coder import note, read, write
from ckpt_codecs.lossy.kernels_matrices import reflect, subtract, times, turned_times

__all__ = ["note", "read", "reflect", "subtract", "times", "turned_times", "write"]
