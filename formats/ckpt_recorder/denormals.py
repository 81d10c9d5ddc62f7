"""Whether this thread flushes denormals to zero, as after `torch.set_flush_denormal(True)`: a replay does not."""

import numpy as np

_SMALLEST = np.frombuffer(b"\x01\0\0\0", "<f4")


def flushes_denormals() -> bool:
    """Does the arithmetic of this thread take denormals for zero, or make them zero?"""
    return bool((_SMALLEST * np.float32(1) == 0).any())
