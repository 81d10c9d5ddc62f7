"""Whether this thread flushes denormals to zero, as after `torch.set_flush_denormal(True)`: a replay does not."""

import struct

_SMALLEST: float = struct.unpack("<d", bytes([1, *bytes(7)]))[0]
"""Copied as bits, because this thread may already flush denormals."""


def flushes_denormals() -> bool:
    """Does the arithmetic of this thread take denormals for zero, or make them zero?"""
    return _SMALLEST * 1.0 == 0.0


flushes_denormals._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled step must not trace it
