"""Numbers as multiples of a step: a uniform quantiser whose zero may be wider than its other bins."""

from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.lossy import symbol_coder as symbols
from ckpt_codecs.lossy.byte_reader import ByteReader
from ckpt_codecs.native import lossy
from ckpt_codecs.scratch import thread_buffer

_HEAD = Struct("<f3B")
_MIDDLE = 128
CENTRED = 3
"""Magnitudes up to this are given back as the mean of what they stand for; others as they are."""


@dataclass(frozen=True)
class Quantizer:
    """Steps of this length. `zero`: the half width of the bin of 0 is so many steps; 0.5 is plain rounding."""

    step: float
    zero: float = 0.5

    def encode(self, values: Array) -> bytes:
        """Of n x m float32. Raises `NotApplicable` where a step is too short for them, or none."""
        step = np.float32(self.step)
        if not (np.isfinite(step) and step > 0):
            raise NotApplicable("there is no step to quantise with")
        codes = _room(values.size).reshape(values.shape)
        sizes, counts = np.empty(CENTRED + 1), np.empty(CENTRED + 1, np.int64)
        if not lossy.quantize(values, step, np.float32(1 - self.zero), codes, sizes, counts):
            raise NotApplicable("the values are too large for the step, or are no numbers")
        centres = [_MIDDLE] * CENTRED if self.zero == 0.5 else _centres(sizes, counts)
        return _HEAD.pack(step, *centres) + symbols.encode(codes, values.shape[1], int(counts[0]))


def decode(data: bytes, out: Array) -> Array:
    """The numbers again, in `out`, n x m of float32. Raises `CodecError` for what is damaged."""
    source = ByteReader(data)
    step, *centres = _HEAD.unpack(source.take(_HEAD.size))
    if not (np.isfinite(step) and step > 0):
        raise CodecError("a quantiser's step is no positive number")
    found = symbols.decode(data[_HEAD.size :], out.size, out.shape[1], _room(out.size))
    near = np.array([0, *(k - 0.5 + centre / 256 for k, centre in enumerate(centres, 1))], np.float32)
    with np.errstate(over="ignore"):
        near *= np.float32(step)
    lossy.dequantize(found.reshape(out.shape), near, np.float32(step), out)
    return out


def _room(count: int) -> Array:
    return thread_buffer("codes", 4 * count).view(np.int32)


def _centres(sizes: Array, counts: Array) -> list[int]:
    """The means of the first bins above zero, in steps from where they would begin if all had a step's width."""
    k = np.arange(CENTRED + 1)
    means = np.where(counts > 0, sizes / np.maximum(counts, 1), k)
    return [int(c) for c in np.clip(np.rint((means - k + 0.5) * 256), 0, 255)[1:]]
