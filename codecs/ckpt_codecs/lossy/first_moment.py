"""First moments: told from the change of the weights, or quantised in units of the second moments' root."""

from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import quantizer as quantise
from ckpt_codecs.lossy.quantizer import Quantizer
from ckpt_codecs.native import lossy

DERIVED, COARSE, ZERO, SCALED = range(4)
"""As a multiple of the change; as multiples of a step; nothing; multiples of a step, times the root."""
STEP, FINE_STEP = 0.5, 0.25
_FACTOR = Struct("<f")


@dataclass(frozen=True)
class MomentContext:
    """The weights, new and old, and the second moments, as they come out: n x m of float32, None if not there."""

    new: Array | None
    old: Array | None
    second: Array | None

    def root(self) -> Array | None:
        return None if self.second is None else np.sqrt(np.abs(self.second))


def encode(true: Array, told: MomentContext, kind: str, fine: bool) -> bytes:
    """Of n x m float32: `kind` is `derived` (where that cannot be: coarse), `coarse` or `zero`."""
    if kind == "zero":
        return bytes([ZERO])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if kind == "derived" and told.new is not None and told.old is not None:
            square, along = lossy.fit_first_moment(told.new, told.old, told.second, true)
            return bytes([DERIVED]) + _FACTOR.pack(np.float32(along / square if square > 0 else 0.0))
        return _quantised(true, told.root(), FINE_STEP if fine else STEP, 0.5 if fine else 0.6)


def _quantised(true: Array, root: Array | None, step: float, zero: float) -> bytes:
    if root is not None:
        values = np.where(root > 0, true / np.where(root > 0, root, np.float32(1)), np.float32(0))
        return bytes([SCALED]) + Quantizer(step, zero).encode(values)
    size = float(np.sqrt(np.square(true, dtype=np.float64).mean())) if true.size else 0.0
    return bytes([COARSE]) + Quantizer(step * size or 1.0, zero).encode(true)


def decode(data: bytes, told: MomentContext, out: Array) -> Array:
    """In `out`, n x m of float32. Raises `CodecError` for what is damaged."""
    kind = data[0] if data else -1
    if kind == ZERO and len(data) == 1:
        out[:] = 0
        return out
    if kind == DERIVED and len(data) == 1 + _FACTOR.size and told.new is not None and told.old is not None:
        (factor,) = _FACTOR.unpack(data[1:])
        lossy.derive_first_moment(factor, told.new, told.old, told.second, out)
        return out
    root = told.root()
    if kind == COARSE or (kind == SCALED and root is not None):
        quantise.decode(data[1:], out)
        if kind == SCALED:
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                out *= root
        return out
    raise CodecError("first moments of a lossy chunk are damaged")
