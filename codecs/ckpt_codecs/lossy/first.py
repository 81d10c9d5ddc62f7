"""First moments: told from the change of the weights, or quantised in units of the second moments' root."""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import quantise
from ckpt_codecs.lossy.quantise import Quantiser

DERIVED, COARSE, ZERO, SCALED = range(4)
"""As a multiple of the change; as multiples of a step; nothing; multiples of a step, times the root."""
STEP, FINE_STEP = 0.5, 0.25
_FACTOR = Struct("<f")


def encode(true: Array, second: Array | None, change: Array | None, kind: str, fine: bool) -> bytes:
    """Of n x m float32: `kind` is `derived` (where that cannot be: coarse), `coarse` or `zero`."""
    if kind == "zero":
        return bytes([ZERO])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return _encode(true, None if second is None else np.sqrt(second), change, kind, fine)


def _encode(true: Array, root: Array | None, change: Array | None, kind: str, fine: bool) -> bytes:
    if kind == "derived" and change is not None:
        told = (change if root is None else change * root).astype(np.float64)
        norm = float(np.square(told).sum())
        factor = float((told * true).sum()) / norm if norm > 0 else 0.0
        return bytes([DERIVED]) + _FACTOR.pack(np.float32(factor))
    step = FINE_STEP if fine else STEP
    if root is not None:
        values = np.where(root > 0, true / np.where(root > 0, root, np.float32(1)), np.float32(0))
        return bytes([SCALED]) + Quantiser(step, 0.5 if fine else 0.6).encode(values)
    size = float(np.sqrt(np.square(true, dtype=np.float64).mean())) if true.size else 0.0
    return bytes([COARSE]) + Quantiser(step * size or 1.0, 0.5 if fine else 0.6).encode(true)


def decode(data: bytes, second: Array | None, change: Array | None, matrix: tuple[int, int]) -> Array:
    """Raises `CodecError` for what is damaged."""
    kind = data[0] if data else -1
    root = None if second is None else np.sqrt(np.abs(second))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if kind == ZERO and len(data) == 1:
            return np.zeros(matrix, np.float32)
        if kind == DERIVED and len(data) == 1 + _FACTOR.size and change is not None:
            factor = np.float32(_FACTOR.unpack(data[1:])[0])
            return factor * (change if root is None else change * root)
        if kind == COARSE:
            return quantise.decode(data[1:], matrix)
        if kind == SCALED and root is not None:
            return quantise.decode(data[1:], matrix) * root
    raise CodecError("first moments of a lossy chunk are damaged")
