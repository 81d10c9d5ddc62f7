"""A uniform scalar quantizer. The bin of zero may be wider than the others (a dead zone)."""

from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.lossy import symbol_coder
from ckpt_codecs.lossy.byte_reader import ByteReader
from ckpt_codecs.native import lossy
from ckpt_codecs.scratch import thread_buffer

_HEAD = Struct("<f3B")
_MIDDLE = 128
CENTERED = 3
"""Magnitudes up to this one decode to the mean of the values in their bin; larger ones to their multiple."""


@dataclass(frozen=True)
class Quantizer:
    """A quantizer with bins of width `step_size`.

    `zero`: half the width of the bin of 0, in steps. 0.5 is plain rounding, more is a dead zone.
    """

    step_size: float
    zero: float = 0.5

    def encode(self, values: Array) -> bytes:
        """The bytes of quantized values. `values`: (n, m) float32.

        Raises `NotApplicable` if the step size is not positive and finite, or too small for the values.
        """
        step_size = np.float32(self.step_size)
        if not (np.isfinite(step_size) and step_size > 0):
            raise NotApplicable("the step size of the quantizer is not positive and finite")
        codes = _codes_buffer(values.size).reshape(values.shape)
        sums, counts = np.empty(CENTERED + 1), np.empty(CENTERED + 1, np.int64)
        if not lossy.quantize(values, step_size, np.float32(1 - self.zero), codes, sums, counts):
            raise NotApplicable("some values are too large for the step size, or not finite")
        centers = [_MIDDLE] * CENTERED if self.zero == 0.5 else _centers(sums, counts)
        return _HEAD.pack(step_size, *centers) + symbol_coder.encode(codes, values.shape[1], int(counts[0]))


def decode(data: bytes, out: Array) -> Array:
    """Decode values into `out`, (n, m) float32, and return it. Raises `CodecError` if the data is damaged."""
    source = ByteReader(data)
    step_size, *centers = _HEAD.unpack(source.take(_HEAD.size))
    if not (np.isfinite(step_size) and step_size > 0):
        raise CodecError("the step size of a quantizer is not positive and finite")
    codes = symbol_coder.decode(data[_HEAD.size :], out.size, out.shape[1], _codes_buffer(out.size))
    small_values = np.array([0, *(k - 0.5 + center / 256 for k, center in enumerate(centers, 1))], np.float32)
    with np.errstate(over="ignore"):
        small_values *= np.float32(step_size)
    lossy.dequantize(codes.reshape(out.shape), small_values, np.float32(step_size), out)
    return out


def _codes_buffer(count: int) -> Array:
    """A buffer of this thread for codes: (count,) int32, valid until the next call."""
    return thread_buffer("codes", 4 * count).view(np.int32)


def _centers(sums: Array, counts: Array) -> list[int]:
    """The means of the first bins above zero, in 1/256 step from where each bin begins in plain rounding.

    `sums`: (4,) float64, the sum of each bin's values in steps. `counts`: (4,) int64.
    """
    k = np.arange(CENTERED + 1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), k)
    return [int(c) for c in np.clip(np.rint((means - k + 0.5) * 256), 0, 255)[1:]]
