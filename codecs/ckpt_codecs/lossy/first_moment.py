"""First moments: derived from the change of the weights, or quantized in units of the second moments' root."""

from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import quantizer
from ckpt_codecs.lossy.quantizer import Quantizer
from ckpt_codecs.native import lossy

DERIVED, COARSE, ZERO, SCALED = range(4)
"""A multiple of the change; multiples of a step; all zero; multiples of a step times the root."""
STEP_SIZE, FINE_STEP_SIZE = 0.5, 0.25
_FACTOR = Struct("<f")


@dataclass(frozen=True)
class MomentContext:
    """The decoded states from which first moments are predicted: each (n, m) float32, or None if it is missing."""

    new: Array | None
    """The weights of this step."""
    old: Array | None
    """The weights of the step before."""
    second: Array | None
    """The second moments of this step."""

    def root(self) -> Array | None:
        """The square root of the magnitudes of the second moments: (n, m) float32, or None."""
        return None if self.second is None else np.sqrt(np.abs(self.second))


def encode(true: Array, context: MomentContext, kind: str, fine: bool) -> bytes:
    """The bytes of first moments. `true`: (n, m) float32.

    `kind` is `derived` (`coarse` where the weights are missing), `coarse` or `zero`. `fine`: use smaller steps.
    """
    if kind == "zero":
        return bytes([ZERO])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if kind == "derived" and context.new is not None and context.old is not None:
            square, product = lossy.fit_first_moment(context.new, context.old, context.second, true)
            factor = _factor(square, product, true) if square > 0 else 0.0
            return bytes([DERIVED]) + _FACTOR.pack(np.float32(factor))
        return _quantize(true, context.root(), FINE_STEP_SIZE if fine else STEP_SIZE, 0.5 if fine else 0.6)


def _factor(square: float, product: float, true: Array) -> float:
    """The multiple of the change that has the drift of first moments, (n, m) float32: their mean without noise.

    Least squares give less where noise prevails: about half, if the change is of many steps. For noise of the last
    steps alone is in both, that of all steps in the change. Drift that moments lack is lost: training goes on as if it
    had missed some steps. How much is noise is told by the correlation of moments and change.

    `square`, `product`: the sums of the change's squares, and of its products with the moments.
    """
    energy = square * float(np.square(true, dtype=np.float64).sum())
    determination = min(1.0, product * product / energy) if energy > 0 else 1.0
    return product / square * (1 + (1 - determination) ** 3)


def _quantize(true: Array, root: Array | None, step_size: float, zero: float) -> bytes:
    if root is not None:
        values = np.where(root > 0, true / np.where(root > 0, root, np.float32(1)), np.float32(0))
        return bytes([SCALED]) + Quantizer(step_size, zero).encode(values)
    rms = float(np.sqrt(np.square(true, dtype=np.float64).mean())) if true.size else 0.0
    return bytes([COARSE]) + Quantizer(step_size * rms or 1.0, zero).encode(true)


def decode(data: bytes, context: MomentContext, out: Array) -> Array:
    """Decode first moments into `out`, (n, m) float32, and return it. Raises `CodecError` if the data is damaged."""
    kind = data[0] if data else -1
    if kind == ZERO and len(data) == 1:
        out[:] = 0
        return out
    if kind == DERIVED and len(data) == 1 + _FACTOR.size and context.new is not None and context.old is not None:
        (factor,) = _FACTOR.unpack(data[1:])
        lossy.derive_first_moment(factor, context.new, context.old, context.second, out)
        return out
    root = context.root()
    if kind == COARSE or (kind == SCALED and root is not None):
        quantizer.decode(data[1:], out)
        if kind == SCALED:
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                out *= root
        return out
    raise CodecError("first moments of a lossy chunk are damaged")
