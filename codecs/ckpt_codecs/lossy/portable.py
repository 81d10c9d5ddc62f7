"""The arithmetic of the kernels without Numba: the same sums in the same order, the same bits, slowly."""

from ckpt_codecs.lossy.portable_coder import note, read, write
from ckpt_codecs.lossy.portable_matrices import reflect, subtract, times, turned_times

__all__ = ["note", "read", "reflect", "subtract", "times", "turned_times", "write"]
